"use strict";
// The state of the page is in the hash: theme, toggled <details> by number, the chosen cell, the section.
(() => {
  const all = [...document.querySelectorAll("main details")];
  const first = all.map((each) => each.open);
  const button = document.getElementById("theme");
  const chosen = document.getElementById("chosen");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let state = new URLSearchParams();
  let applying = false;

  const read = () => {
    const text = location.hash.slice(1);
    if (text.includes("=")) return new URLSearchParams(text);
    return new URLSearchParams(text ? { at: text } : {});
  };

  const write = (changes) => {
    for (const [key, value] of Object.entries(changes)) value ? state.set(key, value) : state.delete(key);
    const text = state.toString();
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  };

  const dark = () => (state.get("theme") || (system.matches ? "dark" : "light")) === "dark";

  const paint = () => {
    const theme = state.get("theme");
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `${button.textContent} theme`);
  };

  const choose = (key) => {
    for (const cell of document.querySelectorAll("a.cell")) {
      const is = cell.dataset.cell === key;
      cell.toggleAttribute("aria-current", is);
      if (is) cell.setAttribute("aria-current", "true");
      if (is) chosen.textContent = cell.dataset.say;
    }
  };

  const apply = () => {
    applying = true;
    state = read();
    const toggled = new Set((state.get("open") || "").split(".").filter(Boolean).map(Number));
    all.forEach((each, k) => (each.open = first[k] !== toggled.has(k)));
    paint();
    choose(state.get("cell"));
    const at = document.getElementById(state.get("at"));
    if (at) at.scrollIntoView();
    requestAnimationFrame(() => requestAnimationFrame(() => (applying = false)));
  };

  button.hidden = false;
  if (chosen) chosen.hidden = false;
  button.addEventListener("click", () => {
    write({ theme: dark() ? "light" : "dark" });
    paint();
  });
  system.addEventListener("change", paint);
  addEventListener("hashchange", apply);
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (!link) return;
    event.preventDefault();
    if (link.dataset.cell) {
      write({ cell: link.dataset.cell });
      choose(link.dataset.cell);
    } else {
      const id = link.getAttribute("href").slice(1);
      write({ at: id });
      document.getElementById(id).scrollIntoView();
      document.getElementById(id).focus({ preventScroll: true });
    }
  });
  for (const each of all) {
    each.addEventListener("toggle", () => {
      if (!applying) write({ open: all.flatMap((it, k) => (it.open !== first[k] ? [k] : [])).join(".") });
    });
  }
  let before = [];
  addEventListener("beforeprint", () => {
    applying = true;
    before = all.map((each) => each.open);
    for (const each of all) each.open = true;
  });
  addEventListener("afterprint", () => {
    all.forEach((each, k) => (each.open = before[k]));
    requestAnimationFrame(() => requestAnimationFrame(() => (applying = false)));
  });
  apply();
})();
