"""The head of the report: a sentence, and a bar for each plan, those of one process and of DDP among them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from splitc import units
from splitc.report.html.elements import Figures, Html, bar, html, table

_BASELINES = {"single_device": "one process", "data_parallel": "DDP"}
_BASES = {
    "measured": ", of a plan that ran here",
    "interpolated": ", priced between what was measured on this cluster",
    "extrapolated": ", priced beyond what was measured on this cluster",
}


@dataclass(frozen=True)
class Bar:
    """A plan: samples/s predicted and measured, 0: not known; spread: relative, of the measured ones."""

    name: str
    predicted: float
    measured: float = 0.0
    spread: float = 0.0
    own: bool = False

    @property
    def strategy(self) -> str:
        return self.name.split()[0]

    @property
    def rate(self) -> float:
        return self.measured or self.predicted

    def times(self, other: Bar) -> float:
        """How many times as fast as another, both measured or both predicted where that is possible."""
        measured = (self.measured and other.measured) or not (self.predicted and other.predicted)
        return self.rate / other.rate if measured else self.predicted / other.predicted


def bars(figures: Figures) -> list[Bar]:
    """Return the plans that have a rate, the fastest first."""
    found = []
    for each in figures["tried"]:
        if each["measured"] and not each["failed"]:
            said, ran = (each["global_batch"] / each[key] if each[key] else 0.0 for key in ("predicted", "measured"))
            found.append(Bar(each["name"], said, ran, each["spread"], each["plan"] == figures["plan"]))
    if not any(each.own for each in found):
        seconds = figures["measured_seconds"]
        measured = figures["global_batch"] / seconds if seconds else 0.0
        if "measured" in figures:
            measured = figures["measured"]["samples_per_second"]["measured"]
        found.append(Bar(figures["strategy"], figures["samples_per_second"], measured, own=True))
    known = {each.strategy for each in found}
    others = (each for each in figures["candidates"] if each["feasible"] and each["strategy"] not in known)
    found += (Bar(each["strategy"], each["samples_per_second"]) for each in others)
    return sorted((each for each in found if each.rate), key=lambda each: -each.rate)


def sentence(figures: Figures) -> str:
    """`AlexNet trains at 7,345 samples/s on 4 ranks of v100-10gbe by late_multiply: 3.6 times as fast as DDP.`.

    A plan of which all ranks work has advice where one process is as fast with the examples of all its readers.
    """
    rows, of = bars(figures), f" of {figures['cluster']}" if figures["cluster"] else ""
    where = f"on {units.numbered(figures['world'], 'rank')}{of}"
    own = next((each for each in rows if each.own), None)
    if own is None:
        return f"{figures['model']} {where}: {figures['strategy']} has no price; --cluster gives it one."
    others = [(name, each) for key, name in _BASELINES.items() for each in rows if each.strategy == key != own.strategy]
    said = {each: " (predicted)" if own.measured and not each.measured else "" for _, each in others}
    working = {rank for ranks in figures["roles"].values() for rank in ranks}
    alone = {"single_device"} if figures["advice"] and len(working) == figures["world"] else set[str]()
    faster = " and ".join(
        f"no faster than {name} with as many examples"
        if each.strategy in alone
        else f"{own.times(each):.1f} times as fast as {name}{said[each]}"
        for name, each in others
    )
    how = f"by {own.name}{'' if figures['exact'] else ', approximately'}{': ' if faster else ''}{faster}"
    return f"{figures['model']} trains at {own.rate:,.0f} samples/s {where} {how}."


def accuracy(figures: Figures) -> str:
    """How the rate of the plan is known, and how well."""
    own = next((each for each in bars(figures) if each.own), Bar(figures["strategy"], 0.0))
    basis = _BASES.get(figures["basis"], "")
    parts = [f"Predicted {own.predicted:,.0f} samples/s ± {figures['error']:.0%}{basis}"] * bool(own.predicted)
    if own.measured:
        spread = f" ± {own.spread:.1%}" if own.spread else ""
        off = f", the prediction is {own.predicted / own.measured - 1:+.1%} off" if own.predicted else ""
        parts.append(f"measured {own.measured:,.0f}{spread}{off}")
    if figures["p90_seconds"] > figures["p50_seconds"]:
        parts.append(f"9 of 10 steps take at most {units.seconds(figures['p90_seconds'])}")
    return f"{'; '.join(parts)}." if parts else ""


def chart(figures: Figures) -> Html:
    """A table with a bar in each row."""
    plans, error = bars(figures), figures["error"]
    most = max((max(each.predicted * (1 + error), each.measured) for each in plans), default=1.0)
    measured, rows = any(each.measured for each in plans), []
    for each in plans:
        name = html("<b>{}</b>" if each.own else "{} <small>{}</small>", each.name, _BASELINES.get(each.strategy, ""))
        picture = bar(each.predicted / most, "own" if each.own else "plain", error, each.measured / most)
        rates = [f"{rate:,.0f}" if rate else "" for rate in (each.predicted, each.measured)[: 1 + measured]]
        times = (f"{each.times(own):.2f}x" for own in plans if own.own)
        rows.append([name, picture, *rates, next(times, "")])
    dots = "; dots are measured" * measured
    caption = (
        f"Samples/s of the best plan of each strategy. Bars are predicted, lines their error of ± {error:.0%}{dots}."
    )
    return table(caption, f"plan|predicted|#samples/s{'|#measured' * measured}|#of the plan", rows, "chart")


def head(figures: Figures) -> Html:
    """The sentence and the chart by themselves, as notebooks show them."""
    style = Html((files("splitc.report.html") / "head.css").read_text(encoding="utf-8"))
    said = sentence(figures), accuracy(figures), chart(figures)
    return html('<style>{}</style><div class="splitc"><p><strong>{}</strong> {}</p>{}</div>', style, *said)
