"""The report as one HTML file, which needs no network and no JavaScript; the same figures make the same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from itertools import product
from typing import Any

from splitc import units
from splitc.report.figures import MEMORY
from splitc.report.html.elements import Figures, Html, bar, every, html, joined, table
from splitc.report.html.head import accuracy, chart, sentence
from splitc.report.html.pictures import swatch, timeline, tree
from splitc.report.tables import by_ranks, rank_list
from splitc.report.text import best_first, priced, with_microbatches
from splitc.version import __version__

_COLORS = 6
_WHAT = {
    **{"cut": "activations between roles", "d_cut": "errors between roles", "loss": "the loss"},
    **{"entry": "activations into a group", "entry_grad": "errors into a group", "bucket": "gradients"},
    **{"node": "values inside a stage", "d_node": "errors inside a stage", "tied": "gradients of tied weights"},
    **{"X, E": "inputs and errors in place of gradients", "average": "weights, averaged"},
    **{"pull": "weights from servers", "push": "gradients to servers"},
}


def page(figures: Figures) -> str:
    """Return the page of what `--json` prints; what the figures lack is left out, and said so."""
    own = files("splitc.report.html")
    page, style, script = (Html((own / f"page.{kind}").read_text(encoding="utf-8")) for kind in ("html", "css", "js"))
    roles = {**dict.fromkeys(each["role"] for each in figures["layers"]), **figures["roles"]}
    color_of = {role: k % _COLORS for k, role in enumerate(roles)}
    shown = ((swatch(color_of[role]), f"{role}{', ' * bool(on)}{rank_list(on or ())}") for role, on in roles.items())
    notes = ([text] for text in (figures["advice"], *figures.get("notes", ())) if text)
    proofs = {"optimal": "proved optimal", "gap": f"within {figures['gap']:.1%} of the best"}
    return html(
        page,
        title=f"{figures['model']} on {units.numbered(figures['world'], 'rank')}",
        **{"plan": figures["plan"], "version": __version__, "style": style, "script": script},
        **{"sentence": sentence(figures), "accuracy": accuracy(figures), "chart": chart(figures)},
        **{"step": units.seconds(figures["step_seconds"]), "examples": f"{figures['global_batch']:,}"},
        **{"layers": len(figures["layers"]), "proof": proofs.get(figures["proof"], "not proved optimal")},
        **{"notes": every('<p class="note">{}</p>\n', notes), "roles": every("<span>{}{}</span>", shown)},
        **{"tree": tree(figures, color_of), "timeline": timeline(figures, color_of)},
        **{"candidates": _candidates(figures), "traffic": _traffic(figures), "memory": _memory(figures)},
        what_if=joined(_what_if(figures)),
        data=Html(json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c")),
    )


def _left_out(text: str) -> Html:
    return html('<p class="sub">{}</p>', text)


def _candidates(figures: Figures) -> Html:
    rows, mine = [], figures["samples_per_second"]
    for each in best_first(figures["candidates"]):
        own, rate = each["strategy"] == figures["strategy"], each["samples_per_second"]
        slower = f"{1 - rate / mine:.0%} slower" if rate < mine else "not what was asked for" if each["exact"] else ""
        why = each["why"] or ("taken" if own else slower), "approximate" * (not each["exact"])
        shown = html("<b>{}</b>" if own else "{}", with_microbatches(each))
        rows.append([shown, *priced(each, ","), "; ".join(filter(None, why))])
    rows += [[each["name"], *[""] * 4, f"out: {each['failed']}"] for each in figures["tried"] if each["failed"]]
    return table("The best plan of each strategy", "strategy|ranks|#examples|#step|#samples/s|why not", rows)


def _traffic(figures: Figures) -> Html:
    rows = []
    for each in sorted(figures.get("collectives", ()), key=lambda each: -each["bytes"]):
        form = f" in {each['form']}" if each["form"] else ""
        what = f"{each['kind'].replace('_', '-')} of {_WHAT.get(each['what'], each['what'])}{form}"
        hidden = ["", ""] if each["hidden"] is None else [f"{each['hidden']:.0%}", bar(each["hidden"])]
        rows.append([what, each["ranks"], f"{each['count']:,.4g}", units.nbytes(each["bytes"]), *hidden])
    caption = "Messages and collectives of a step, with the bytes that all ranks send; hidden: nobody waits for them"
    headers = "what|#ranks|#number|#bytes|#hidden|share of their time"
    nothing = _left_out("Nothing travels, or it is not known: a large build has no record.")
    return table(caption, headers, rows) if rows else nothing


def _memory(figures: Figures) -> Html:
    if "memory_bytes" not in figures["ranks"][0]:
        return _left_out("A build does not tell the memory of its ranks; splitc inspect does.")
    kinds = [kind for kind in MEMORY if any(each[f"{kind}_bytes"] for each in figures["ranks"])]
    most, rows = max(each["memory_bytes"] for each in figures["ranks"]) or 1, list[tuple[int, list[str]]]()
    for each in figures["ranks"]:
        sizes = (units.nbytes(each[f"{kind}_bytes"]) for kind in kinds)
        rows.append((each["rank"], [each["role"] or "idle", *sizes, bar(each["memory_bytes"] / most)]))
    caption = "Memory of the ranks; each kind is at its own peak, so their sum may be more than the peak of all"
    names = "|".join(f"#{kind}" for kind in kinds).replace("memory", "peak", 1)
    return table(caption, f"ranks|role|{names}|of the largest", by_ranks(rows))


def _what_if(figures: Figures) -> Iterator[Html]:
    if not (grid := figures.get("what_if")):
        yield _left_out("No other bandwidth, batch or world was planned.")
        return
    cells = {tuple(cell[key] for key in grid["now"]): cell for cell in grid["cells"]}
    links, sizes, worlds = (sorted(set(of)) for of in zip(*cells, strict=True))
    batch = "examples a reader" if grid["of_a_reader"] else "global batch"
    headers = "|#".join([batch, *map(units.bandwidth, links)])
    drawn = {at: _cell(cells.get(at), grid["now"], batch) for at in product(links, sizes, worlds)}
    for world in worlds:
        rows = [[f"{size:,}", *(drawn[link, size, world] for link in links)] for size in sizes]
        yield table(f"{units.numbered(world, 'rank')}: samples/s, and the plan", headers, rows)
    if left := grid["left_out"]:
        yield _left_out(f"{left} further cells were not planned for want of time; SPLITC_ADVICE=120 gives two minutes.")


def _cell(cell: Figures | None, now: Mapping[str, Any], batch: str) -> Html:
    if cell is None:
        return html("<small>not planned</small>")
    rate = f"{cell['samples_per_second']:,.0f}" if cell["choice"] else "no plan"
    where = f"{units.bandwidth(cell['bandwidth'])}, {cell['batch']:,} {batch}, {units.numbered(cell['world'], 'rank')}"
    says = f"{where}: {f'{rate} samples/s by ' if cell['choice'] else ''}{cell['choice'] or cell['why']}"
    look = " flip" * cell["flips"] + " now" * all(cell[key] == value for key, value in now.items())
    key = f"{cell['bandwidth']:.4g}/{cell['batch']}/{cell['world']}"
    markup = '<a class="cell{}" href="#cell={}" data-cell="{}" data-say="{}"><b>{}</b><small>{}</small></a>'
    return html(markup, look, key, key, says, rate, cell["choice"])
