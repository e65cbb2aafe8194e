"""What is measured: models, places, and the plans of a cell that the choice is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks import cases
from benchmarks.choice.figures import AUTO, SCRIPTS, Cell, Measured, Side
from benchmarks.overlap.sides import PLACES
from benchmarks.session import ROOT
from splitc.errors import PlacementError
from splitc.ir.cluster import Cluster
from splitc.ir.plan import Plan
from splitc.passes.planner.registry import STRATEGIES
from splitc.passes.planner.strategy import Strategy, parse_strategy, strategy_named
from splitc.specialise import Settings

MICROBATCHES = 1, 2, 4


@dataclass(frozen=True)
class Model:
    """A model file; the sizes of its example, in place of its own; the momentum of SGD.

    sparse: its tables are trained with sparse gradients elsewhere, so that is measured beside it, without momentum.
    """

    file: str
    sizes: str | None = None
    sparse: bool = False

    @property
    def momentum(self) -> float:
        return 0.0 if self.sparse else 0.9

    @property
    def scripts(self) -> list[str]:
        return [name for name in SCRIPTS if self.sparse or not name.startswith("sparse")]


MODELS = {
    **{name: Model(str(file), sizes) for name, (file, sizes) in cases.MODELS.items()},
    "alexnet": Model(str(cases.MODELS["alexnet"][0]), "32x3x224x224"),
    "recommender": Model(str(ROOT / "examples" / "recommender.py"), sparse=True),
    "digits": Model(str(ROOT / "examples" / "digits.py")),
    "language": Model(str(ROOT / "examples" / "transformer.py"), "2"),
    "extreme": Model(str(ROOT / "examples" / "extreme.py")),
    "bags": Model(f"{ROOT / 'benchmarks' / 'models' / 'recommender_bags.py'}:with_sparse_gradients", sparse=True),
    "single": Model(str(ROOT / "benchmarks" / "models" / "recommender_single.py"), sparse=True),
}
"""As in `benchmarks.accuracy`, but for AlexNet's images, which are those of `benchmarks.overlap`, and more."""

CELLS = [Cell(model, place) for place in PLACES for model in (*cases.MODELS, "recommender")]


def decision(plan: Plan) -> str:
    """The same for plans that make the same programs."""
    return replace(plan.decided, strategy="", model="").hash


def proposed(case: cases.Case, cell: Cell, cluster: Cluster, finalists: int, asked_for: Sequence[str] = ()) -> Measured:
    """The plans of a cell, distinct: auto's, every exact strategy's in microbatches, and the best that auto compared.

    asked_for: in place of every exact strategy these.

    All for the same global batch: of each rank as many examples as the model file has.
    """
    world, program = cell.place.world, case.program
    examples = world * case.file.example.batch
    found: dict[str, Side] = {}
    missing: dict[str, str] = {}

    def add(asked: str, plan: Plan) -> None:
        key = decision(plan)
        side = found.get(key, Side((), plan.to_json(), plan.step_seconds))
        found[key] = replace(side, asked=(*side.asked, asked))

    auto = Settings(world, examples, cluster, "auto").place()
    chosen = auto.run(program).plan
    add(AUTO, chosen)
    for asked in asked_for or strategies():
        try:
            add(asked, Settings(world, examples, cluster, asked).place().run(program).plan)
        except PlacementError as error:
            missing[asked] = str(error)
    ranked = sorted(auto.simulated(program), key=lambda each: each.seconds)
    for each in [each for each in ranked if each.exact and each.plan is not None][:finalists]:
        assert each.plan is not None
        sums = {place.sync for place in each.plan.placements.values()}
        nbytes = chosen.bucket_bytes if "all_reduce" in sums else None
        seconds = replace(chosen.prediction, step_seconds=each.seconds, phases=())
        add(f"auto: {each.strategy}", replace(each.plan, bucket_bytes=nbytes, prediction=seconds))
    scripts = [Side((name,)) for name in MODELS[cell.model].scripts]
    return Measured(cell, examples, (*found.values(), *scripts), missing)


def strategies() -> list[str]:
    """Every exact strategy that `auto` is made of, in 1, 2 and 4 microbatches; one process, alone, in one."""
    kinds: Mapping[str, type[Strategy]] = {name: strategy_named(name) for name in STRATEGIES}
    names = [name for name, kind in kinds.items() if kind.exact and kind.compared and not kind.spans]
    return [
        name if number == 1 else str(replace(parse_strategy(name), microbatches=number))
        for name in names
        for number in (MICROBATCHES if name != "single_device" else MICROBATCHES[:1])
    ]
