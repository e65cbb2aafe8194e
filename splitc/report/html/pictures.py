"""The model as a tree, and a step of all ranks on one scale, colored by role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from splitc import units
from splitc.report.html.elements import Figures, Html, every, html, joined, table
from splitc.report.tables import by_ranks, rank_list
from splitc.report.text import held

_OPEN = 2  # levels that are open when the page is
_SHOWN = 16  # lanes, beside which further ones are folded
_STREAMS = (("waiting", "wait", 7, 14), ("compute", "c{}", 7, 14), ("communication", "comm", 18, 4))
_KEYS = ("compute", "waiting", "communication")
_UNKNOWN = "The order within a step is not known: that takes the model, a cluster, and not too many layers and ranks."
Layers = Sequence[tuple[tuple[str, ...], Figures]]
"""Layers, each with the words of its name within a module."""


def tree(figures: Figures, color_of: Mapping[str, int]) -> Html:
    """Return the tree.  color_of: role -> the number of its color."""
    layers = [(tuple(layer["name"].split(".")), layer) for layer in figures["layers"]]
    titles = ("module", "placement", "parameters", "sends", "computes", "share")
    top = html('<div class="row top" aria-hidden="true">{}</div>', every("<span>{}</span>", zip(titles)))
    total = sum(layer["seconds"] for _, layer in layers) or 1.0
    return html('<div class="tree">{}<ul>{}</ul></div>', top, _item(figures["model"], layers, color_of, total, 0))


def _item(name: str, layers: Layers, color_of: Mapping[str, int], total: float, depth: int) -> Html:
    """Return a module with what is within it; of modules that repeat, all but the first are folded."""
    why, groups, items = "", dict[str, list[tuple[tuple[str, ...], Figures]]](), list[Html]()
    for words, layer in layers:
        why = why if words else layer["why"]
        if words:
            groups.setdefault(words[0], []).append((words[1:], layer))
    for _, run in groupby(groups.items(), key=lambda each: (each[0].isdigit() or each[0], _looks(each[1]))):
        found = [(word, _item(word, inner, color_of, total, depth + 1)) for word, inner in run]
        shown = [item for _, item in found]
        if len(found) > 2:
            fold = '<li><details><summary class="fold">{} to {}: as {}</summary><ul>{}</ul></details></li>'
            shown[1:] = [html(fold, found[1][0], found[-1][0], found[0][0], joined(shown[1:]))]
        items += shown
    row = _row(name, [layer for _, layer in layers], color_of, total)
    if not items and not why:
        return html("<li>{}</li>\n", row)
    within = html('<p class="why">{}</p>', why) if why else "", html("<ul>{}</ul>", joined(items)) if items else ""
    is_open = " open" if items and depth < _OPEN else ""
    return html("<li><details{}><summary>{}</summary>{}{}</details></li>\n", is_open, row, *within)


def _looks(layers: Layers) -> object:
    """Equal for modules that repeat."""
    return [(words, layer["role"], held(layer), *_cells([layer])) for words, layer in layers]


def _row(name: str, layers: Sequence[Figures], color_of: Mapping[str, int], total: float) -> Html:
    placed = list(dict.fromkeys((each["role"], each["holding"], held(each)) for each in layers))
    swatches = joined(swatch(color_of[role], holding) for role, holding in dict.fromkeys(each[:2] for each in placed))
    role, _, how = placed[0]
    text = f"{len(placed)} kinds" if len(placed) > 1 else role if how == "none" else f"{role} · {how}"
    cells = zip(("parameters", "sends", "computes"), _cells(layers), strict=True)
    share, look = sum(each["seconds"] for each in layers) / total, "plain" if len(placed) > 1 else f"r{color_of[role]}"
    return html(
        '<span class="row"><span class="name">{}</span><span>{}{}</span>{}<svg height="12" width="100%" '
        'aria-hidden="true"><rect width="{}" height="6" y="3" rx="1" class="{}"></rect></svg></span>',
        *(name, swatches, text, every('<span class="n"><span class="vh">{} </span>{}</span>', cells)),
        *(f"{share:.1%}", look),
    )


def swatch(color: int, holding: str = "replicated") -> Html:
    """Return a square in the color of a role: full, or hatched where a rank holds a part."""
    return html('<i class="sw b{}{}"></i>', color, "" if holding == "replicated" else " part")


def _cells(layers: Sequence[Figures]) -> list[str]:
    shown = {"parameters": units.count, "sent_bytes": units.nbytes, "seconds": units.seconds}
    sums = {key: sum(each.get(key, 0) for each in layers) for key in shown}
    return [shown[key](value) if value else "" for key, value in sums.items()]


def timeline(figures: Figures, color_of: Mapping[str, int]) -> Html:
    """Return the lanes of all ranks, where their steps are known, and what they do as a table."""
    both = {"predicted": figures.get("timeline"), "measured": figures.get("measured", {}).get("timeline")}
    seconds = max((of["seconds"] for of in both.values() if of), default=0.0)
    lanes = [(name, of, lane) for name, of in both.items() if of for lane in of["lanes"]]
    lanes.sort(key=lambda each: (each[2]["ranks"][0], each[0] == "measured"))
    rows = [_lane(*each, seconds, figures, color_of) for each in lanes]
    more = html("<details><summary>{} more</summary>{}</details>", len(rows[_SHOWN:]), joined(rows[_SHOWN:]))
    parts = _axis(seconds), joined(rows[:_SHOWN]), more if rows[_SHOWN:] else ""
    drawn = html('<div class="lanes">{}{}{}</div>', *parts) if rows else html('<p class="sub">{}</p>', _UNKNOWN)
    headers = "ranks|role|step|#computes|#waits|#transfers under way|#sends"
    return html("{}{}", drawn, table("A step of each rank", headers, by_ranks(_phases(figures))))


def _lane(name: str, of: Figures, lane: Figures, seconds: float, figures: Figures, color_of: Mapping[str, int]) -> Html:
    duties = figures["ranks"][lane["ranks"][0]]["role"] or "idle"
    color = color_of.get(duties, "x")
    paths = ((_path(lane[key], y), look.format(color), height) for key, look, y, height in _STREAMS)
    return html(
        '<div class="lane {}"><span>{} <small>{}, {}</small></span><svg viewBox="0 0 {} 22" preserveAspectRatio="none" '
        'width="100%" height="22" aria-hidden="true">{}</svg></div>\n',
        *(name, rank_list(lane["ranks"]), duties, name, f"{of['parts'] * seconds / of['seconds']:.6g}"),
        every('<path d="{}" class="{} s{}"></path>', paths),
    )


def _path(ends: Sequence[int], y: int) -> str:
    """Return the lines from each even end to the next."""
    gaps = zip((0, *ends[1::2]), ends[::2], ends[1::2], strict=False)
    return f"M0 {y}" + "".join(f"m{a - before} 0h{b - a}" for before, a, b in gaps)


def _axis(seconds: float) -> Html:
    """Return at most six ticks at round times."""
    steps = (scale * 10.0**power for power in range(-9, 6) for scale in (1, 2, 5))
    step = next(each for each in steps if seconds <= 6 * each)
    ends = (k * step for k in range(int(seconds / step) + 1 if seconds else 0))
    ticks = ((f"{end / seconds:.2%}", units.seconds(end)) for end in ends)
    return html('<div class="axis" aria-hidden="true">{}</div>', every('<span style="left:{}">{}</span>', ticks))


def _phases(figures: Figures) -> Iterator[tuple[int, list[str]]]:
    for each in figures["ranks"]:
        own = {key: each[f"{key}_seconds"] for key in _KEYS} | {"sent_bytes": each["sent_bytes"]}
        measured = (of["measured"] for of in figures.get("measured", {}).get("ranks", ()) if of["rank"] == each["rank"])
        for name, of in (*[("predicted", own)] * any(own.values()), *(("measured", of) for of in measured)):
            seconds = (units.seconds(of[key]) for key in _KEYS)
            yield each["rank"], [each["role"] or "idle", name, *seconds, units.nbytes(of["sent_bytes"])]
