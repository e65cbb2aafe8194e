"""Write `step`, `evaluate` and `predict` of the ranks of one rank program, and the functions of its features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from splitc.codegen.features import features
from splitc.codegen.step import StepWriter
from splitc.ir.program import LoweredProgram, Refusal, Stage
from splitc.ir.schedule.actions import RankProgram


def step_functions(program: LoweredProgram, rank_program: RankProgram) -> Iterator[list[str]]:
    """Yield the lines of each function."""
    train = StepWriter(program, rank_program)
    step = f"Forward and backward of one batch; the gradients {_where(train.stages)}." if train.stages else _doc("step")
    loss = "The loss of one batch, forward only." if train.stages else _doc("evaluate")
    yield train.function(step)
    for feature in features():
        yield from feature.further(train)
    yield _evaluate(program, rank_program, loss)
    yield _predict(program, rank_program)


def _evaluate(program: LoweredProgram, rank_program: RankProgram, doc: str) -> list[str]:
    """The lines of `evaluate`."""
    if isinstance(evaluated := program.evaluated, Refusal):
        return _refused("evaluate")
    return StepWriter(evaluated, evaluated.rank_program(rank_program.ranks[0]), "evaluate").function(doc)


def _predict(program: LoweredProgram, rank_program: RankProgram) -> list[str]:
    """The lines of `predict`."""
    if isinstance(predicted := program.predicted, Refusal):
        return _refused("predict")
    trained = [role for role in rank_program.roles if role in program.plan.roles]
    writer = StepWriter(predicted, predicted.rank_program(rank_program.ranks[0]), "predict", trained)
    if any(stage.has_loss for stage in writer.stages):
        doc = "The model's output for this rank's examples, forward only."
    elif writer.stages:
        doc = "This rank's part of the model's output, which the readers receive."
    else:
        doc = _doc("predict")
    return writer.function(doc)


def _refused(function: str) -> list[str]:
    return [f"def {function}(*_):", '    """Refused; rankN.py says why."""', "    raise NotImplementedError"]


def _where(stages: Sequence[Stage]) -> str:
    """Where a step leaves the gradients."""
    summed = ", summed" if any(stage.buckets for stage in stages) else ""
    own = [where for feature in features() if (where := feature.where(stages))]
    return ", or ".join([f"are left in `.grad`{summed}"] * (bool(summed) or not own) + own)


def _doc(function: str) -> str:
    """What a function of ranks without stages does."""
    return next((feature.docs[function] for feature in features() if function in feature.docs), "")
