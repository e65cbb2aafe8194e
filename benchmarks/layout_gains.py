"""What the integer program gains over the strategies of the papers, beside closed forms of the same prices.

    python -m benchmarks.layout_gains

Nothing overlaps and one microbatch is worked on at a time, so that a step is a sum; memory is no limit.  Rates are
samples/s over those of plain data parallelism; layers are priced by the roofline of a V100.

    papers     the best of late multiply and modulo/shard, by columns alone
    divided    the best states of the layers in groups of all ranks; no linear layer is computed alike on all of a group
    all        with such layers too: they cost computing, but nothing is sent for them and no gradient is summed

The closed forms computed by hand know the first two.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from tabulate import tabulate

from splitc.cli.model_file import load_model
from splitc.cost_models.clusters.named import load_cluster
from splitc.ir.program import Program
from splitc.passes.analysis import analyse
from splitc.passes.planner.cuts import cut_rules
from splitc.passes.planner.divisions import Division
from splitc.passes.planner.integer_program import solve
from splitc.passes.planner.options import make_problem
from splitc.passes.planner.problem import Option
from splitc.passes.planner.request import Request
from splitc.passes.planner.search import first_assignment
from splitc.passes.planner.strategy import Strategy
from splitc.strategies.data_parallel import DataParallel
from splitc.strategies.late_multiply import LateMultiply
from splitc.strategies.mixed import Mixed
from splitc.strategies.modulo_shard import ModuloShard

BATCH = {"alexnet": 128, "vgg16": 64}  # examples of a rank
SECONDS = 60.0  # for an integer program


@dataclass(frozen=True)
class Setting:
    """A model on so many ranks of a bandwidth (bit/s), and its two rates by the closed forms."""

    model: str
    ranks: int
    bandwidth: float
    papers: float
    layouts: float


SETTINGS = (
    Setting("alexnet", 4, 10e9, 3.22, 3.53),
    Setting("alexnet", 8, 10e9, 2.48, 3.02),
    Setting("alexnet", 11, 10e9, 2.07, 2.65),
    Setting("alexnet", 64, 10e9, 2.16, 2.53),
    Setting("alexnet", 16, 2.6e9, 2.66, 3.38),
    Setting("vgg16", 16, 10e9, 1.67, 1.83),
    Setting("vgg16", 16, 2.6e9, 2.52, 3.07),
)


@dataclass(frozen=True)
class Gain:
    """A rate over that of data parallelism, and where it comes from.

    holdings: (layer, holding and state) of those that are not data parallel.
    """

    rate: float
    group: int
    holdings: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        layers = ", ".join(f"{layer} {how}" for layer, how in self.holdings)
        return f"groups of {self.group}: {layers}" if self.group > 1 else layers


def program_of(model: str) -> Program:
    """A model of the examples, captured."""
    file = load_model(f"examples/{model}.py", "2x3x224x224")
    return replace(analyse(file.model, file.example, evaluation=False), batch=BATCH[model])


def gains(program: Program, setting: Setting) -> tuple[Gain, Gain, Gain]:
    """The best of the papers', of those without layers that are computed alike, and of all, over data parallelism."""
    cluster = load_cluster("v100-10gbe").with_bandwidth(setting.bandwidth / 8)
    request = Request(program, cluster, setting.ranks, memory=1e15)
    plain = DataParallel().divisions(request)
    seconds = 1.0 / best(request, DataParallel(), plain, 1.0).rate
    papers = [
        best(request, each, each.divisions(request), seconds, lambda o: o.split != "rows" and not _alike(o))
        for each in (LateMultiply(), ModuloShard())
    ]
    everyone = [each for each in Mixed().divisions(request) if _shares_all(each)]
    divided, whole = (
        best(request, Mixed(), everyone, seconds, allowed) for allowed in (lambda o: not _alike(o), lambda o: True)
    )
    return max(papers, key=lambda each: each.rate), divided, whole


def _alike(option: Option) -> bool:
    return option.holding == "replicated" and option.makes == "replicate"


def _shares_all(division: Division) -> bool:
    """Whether all roles run on all ranks, on the whole batch at once."""
    return division.order.pieces == 1 and len({role.ranks for role in division.roles}) == 1


def best(
    request: Request,
    strategy: Strategy,
    divided: Iterable[Division],
    seconds: float,
    allowed: Callable[[Option], bool] = lambda option: True,
) -> Gain:
    """The best assignment of a strategy, without overlap.

    seconds: of a step of data parallelism.  allowed: the options of linear layers that may be taken.
    """
    rules, given = cut_rules(request.program), strategy.space(request, False)
    space = replace(
        given, allows=lambda d, layer, o: given.allows(d, layer, o) and (layer not in request.linears or allowed(o))
    )
    found: list[Gain] = []
    for division in divided:
        problem = replace(make_problem(request, rules, division, space), overlap=False)
        answer = solve(problem, SECONDS, first_assignment(problem))
        if answer.chosen is not None:
            gain = Gain(
                seconds / answer.seconds,
                division.roles[-1].group,
                tuple(_differing(answer.chosen.items(), request.linears)),
            )
            found.append(gain)
    return max(found, key=lambda each: each.rate)


def _differing(chosen: Iterable[tuple[str, Option]], linears: Collection[str]) -> Iterable[tuple[str, str]]:
    for layer, option in chosen:
        if option.split:
            yield layer, f"{option.split}>{option.makes[0].upper()}"
        elif option.sync == "late_multiply":
            yield layer, "late"
        elif _alike(option) and layer in linears:
            yield layer, "alike"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["alexnet", "vgg16"], help="those of the table to compute")
    asked = parser.parse_args()
    rows = []
    for name in asked.models:
        program = program_of(name)
        for setting in (each for each in SETTINGS if each.model == name):
            found = gains(program, setting)
            by_hand = (setting.papers, setting.layouts, None)
            rows += [
                (name, f"{setting.bandwidth / 1e9:g} Gbit/s", setting.ranks, what, hand, gain.rate, str(gain))
                for what, hand, gain in zip(("papers", "divided", "all"), by_hand, found, strict=True)
            ]
    heads = ("model", "network", "ranks", "of", "by hand", "program", "its linear layers")
    print(tabulate(rows, heads, floatfmt=".2f"))


if __name__ == "__main__":
    main()
