"""The tables of docs/measurements/papers.md: what the papers print beside what splitc counts on models and clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial

from benchmarks.papers import practical_lessons, splitbrain
from benchmarks.papers.conv_fc_split import conv_fc_split
from benchmarks.papers.krizhevsky import SCHEMES, Exchange
from benchmarks.papers.stanza import (
    Memory,
    Symbols,
    assign_nodes,
    assign_ps_nodes,
    memory_of,
    ps_step_seconds,
    speedup,
    step_seconds,
    symbols_of,
)
from splitc.cost_models.clusters.named import load_cluster
from tests.support.paper_models import counted, inception_v3, parameters, resnet152, splitbrain_vgg

BATCH = {"AlexNet": 128, "VGG-16": 64, "VGG-19": 64}
"""Stanza's table 5."""

STANZA_1 = {
    "AlexNet": (61.1, 488.8, 1.56),
    "VGG-16": (138, 1104, 3.53),
    "VGG-19": (143, 1144, 3.66),
    "Inception-V3": (27, 216, 0.69),
    "ResNet-152": (60.2, 481.6, 1.54),
}
"""Table 1: parameters (M), gradients and parameters of one worker (MB), seconds for four at 10 Gbit/s."""

MEASURED = {"AlexNet": 1.99, "VGG-16": 4.93, "VGG-19": 5.15}
"""Table 1: seconds of a step with a parameter server."""

FIGURE_8 = {
    "AlexNet": {(80, 40): 1.79, (40, 25): 2.29, (40, 100): 1.55},
    "VGG-16": {(80, 40): 1.97, (40, 25): 2.35, (40, 100): 1.72},
    "VGG-19": {(80, 40): 1.87, (40, 25): 2.33, (40, 100): 1.84},
}
"""Section 7.2: (nodes, Gbit/s) -> throughput of Stanza over that of the parameter server."""


@cache
def by_roofline(model: str, gbits: int = 10) -> tuple[Symbols, Memory]:
    """A model on V100 with links of `gbits` Gbit/s, its times by the roofline."""
    cluster, parts, K = load_cluster(f"v100-{gbits}gbe"), counted(model), BATCH[model]
    return symbols_of(parts, K, cluster.link.bandwidth, cluster.device), memory_of(parts, K, cluster.device)


def by_table_1(model: str) -> Symbols:
    """The same with T_ps = measured time less communication, both of table 1, and T_c to T_f as their FLOPs."""
    parts, (s, _) = counted(model), by_roofline(model)
    conv, fc = parts.forward_flops(parts.conv), parts.forward_flops(parts.fc)
    T_ps = MEASURED[model] - STANZA_1[model][2]
    return replace(s, T_c=T_ps * conv / (conv + fc), T_f=T_ps * fc / (conv + fc))


@cache
def fitted(model: str) -> float:
    """The T_c with which the equations come nearest to all three ratios of figure 8, T_f by the roofline."""

    def worst(T_c: float) -> float:
        return max(abs(at(model, *point, T_c)[0] / paper - 1) for point, paper in FIGURE_8[model].items())

    return min((0.02 * 1.02**k for k in range(250)), key=worst)


def at(model: str, nodes: int, gbits: int, T_c: float | None = None) -> tuple[float, Symbols, Memory]:
    """The ratio of figure 8 on a V100 cluster with its times by the roofline, or another T_c."""
    s, memory = by_roofline(model, gbits)
    s = s if T_c is None else replace(s, T_c=T_c)
    return speedup(s, nodes, memory), s, memory


# -- the tables --------------------------------------------------------------------------------------------------------


def stanza_1() -> Iterable[list[str]]:
    yield [
        "model",
        "parameters, paper",
        "counted",
        "MB of a worker, paper",
        "counted",
        "s of four, paper",
        "eq. (6)",
        "",
    ]
    others = {"Inception-V3": inception_v3, "ResNet-152": resnet152}
    for model, (millions, megabytes, seconds) in STANZA_1.items():
        P = parameters(others[model]) if model in others else counted(model).P
        s = replace(by_roofline("AlexNet")[0], P=P, T_ps=0.0)
        ours = ps_step_seconds(s, 4, 1)
        moved = ps_step_seconds(s, 1, 1) * s.B / 1e6
        yield [
            model, f"{millions:g} M", f"{P / 1e6:.1f} M", f"{megabytes:g}", f"{moved:.1f}", f"{seconds:.2f}",
            f"{ours:.3f}", _off(ours, seconds),
        ]  # fmt: skip


def stanza_2() -> Iterable[list[str]]:
    yield ["model", "", "paper", "counted", ""]
    for model, conv, fc in (("AlexNet", 2.47e6, 5.86e7), ("VGG-16", 1.47e7, 1.24e8)):
        parts = counted(model)
        for name, paper, P in (("conv", conv, parts.P_c), ("fc", fc, parts.P - parts.P_c)):
            yield [model, f"{name} parameters", f"{paper:.2e}", f"{P:.3e}", _off(P, paper)]
    for model, unit, conv, fc in (("AlexNet", 1, 1.35e9, 1.17e8), ("VGG-16", 2, 1.09e10, 1.21e8)):
        parts = counted(model)
        what = {1: "FLOPs", 2: "multiply-adds"}[unit]
        for name, paper, layers in (("conv", conv, parts.conv), ("fc", fc, parts.fc)):
            ours = parts.forward_flops(layers) / unit
            yield [model, f"{name} {what}", f"{paper:.2e}", f"{ours:.3e}", _off(ours, paper)]


def stanza_times() -> Iterable[list[str]]:
    yield [
        "model", "K", "T_c", "T_f", "eq. (6), 4 workers", "measured, paper", "", "10 workers, eqs. (3), (6)", "paper",
        "T_ps, table 1", "T_c, fitted", "T_c at the float32 peak",
    ]  # fmt: skip
    paper = {"AlexNet": "13.9", "VGG-16": "8.2", "VGG-19": ""}
    for model, measured in MEASURED.items():
        device, parts, (s, _) = load_cluster("v100-10gbe").device, counted(model), by_roofline(model)
        step, given = ps_step_seconds(s, 4, 1), by_table_1(model)
        ten = ps_step_seconds(s, 10, 1) / step_seconds(s, 10, 1)
        flops = sum(parts.program.costs[layer].at(s.K).flops for layer in parts.conv)
        yield [
            model, str(s.K), f"{s.T_c:.3f} s", f"{s.T_f:.4f} s", f"{step:.2f} s", f"{measured:.2f} s",
            _off(step, measured), f"{ten:.1f}", paper[model], f"{given.T_c + given.T_f:.2f} s",
            f"{fitted(model):.2f} s", f"{flops / device.flop_rate['float32']:.3f} s",
        ]  # fmt: skip


def figure_8() -> Iterable[list[str]]:
    yield [
        "model",
        "nodes",
        "Gbit/s",
        "paper",
        "roofline",
        "",
        "n_c + n_f",
        "n_w + n_s",
        "table 1",
        "",
        "fitted T_c",
        "",
    ]
    for model, points in FIGURE_8.items():
        for (nodes, gbits), paper in points.items():
            ours, s, memory = at(model, nodes, gbits)
            measured = speedup(replace(by_table_1(model), B=s.B), nodes, memory)
            nearest, *_ = at(model, nodes, gbits, fitted(model))
            yield [
                model, str(nodes), str(gbits), f"{paper:.2f}", f"{ours:.2f}", _off(ours, paper, 0),
                "{} + {}".format(*assign_nodes(s, nodes, memory)), "{} + {}".format(*assign_ps_nodes(s, nodes)),
                f"{measured:.2f}", _off(measured, paper, 0), f"{nearest:.2f}", _off(nearest, paper, 0),
            ]  # fmt: skip


def practical_lessons_2() -> Iterable[list[str]]:
    yield ["GPUs", "data parallel, paper", "2 n P", "", "hybrid, paper", "2 n P_c + 2 b A", ""]
    parts, mebi = counted("AlexNet with groups"), 2**20
    for n, data, hybrid in ((2, 930, 54), (4, 1861, 89), (8, 3722, 161)):
        ours = practical_lessons.data_parallel_nbytes(parts.P, n) / mebi
        mixed = practical_lessons.hybrid_nbytes(parts.P_c, parts.A, 256, n) / mebi
        yield [
            str(n), f"{data} MiB", f"{ours:.0f} MiB", _off(ours, data), f"{hybrid} MiB", f"{mixed:.1f} MiB",
            _off(mixed, hybrid),
        ]  # fmt: skip


def splitbrain_1() -> Iterable[list[str]]:
    parts = conv_fc_split(splitbrain_vgg())
    fc = parts.P - parts.P_c
    yield ["", "paper", "counted"]
    yield ["conv parameters", "1,734,336", f"{parts.P_c:,}"]
    yield ["fc parameters", "5,253,120", f"{fc:,}"]
    yield ["their shares", "24.83 %, 75.17 %", f"{100 * parts.P_c / parts.P:.2f} %, {100 * fc / parts.P:.2f} %"]
    savings = [f"{100 * splitbrain.memory_saving(parts.P, fc, mp):.1f} %" for mp in (2, 4, 8)]
    yield ["parameter memory saved, mp = 2, 4, 8", "up to 67 %", ", ".join(savings)]


def schemes() -> Iterable[list[str]]:
    yield [
        "scheme",
        "microbatches",
        "examples of a microbatch",
        "activations of a microbatch",
        "sent by all",
        "time at 10 Gbit/s",
    ]
    link = replace(load_cluster("v100-10gbe").link, latency=0.0)
    for scheme in SCHEMES:
        each = Exchange(scheme, 128, 8, 4 * counted("AlexNet").A)
        yield [
            scheme, str(each.num_microbatches), str(each.examples), f"{each.held / 1e6:.1f} MB",
            f"{each.nbytes / 1e6:.0f} MB", f"{1e3 * each.seconds(link):.1f} ms",
        ]  # fmt: skip


def _off(ours: float, paper: float, digits: int = 1) -> str:
    percent = round(100 * (ours / paper - 1), digits) + 0.0  # no minus before a zero
    return f"{percent:+.{digits}f} %"


def _markdown(rows: Callable[[], Iterable[list[str]]]) -> str:
    head, *body = rows()
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    "stanza 1": partial(_markdown, stanza_1),
    "stanza 2": partial(_markdown, stanza_2),
    "stanza times": partial(_markdown, stanza_times),
    "figure 8": partial(_markdown, figure_8),
    "practical lessons 2": partial(_markdown, practical_lessons_2),
    "splitbrain 1": partial(_markdown, splitbrain_1),
    "schemes": partial(_markdown, schemes),
}
"""Name in the page -> its text."""
