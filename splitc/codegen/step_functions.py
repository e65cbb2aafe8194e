"""Write `step`, `evaluate` and `predict` of the ranks of one rank program, and what begins and ends their rounds."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.codegen.step import StepWriter
from splitc.ir.program import LoweredProgram, Refusal, Stage
from splitc.ir.schedule.actions import RankProgram
from splitc.ir.schedule.verbs import When


def step_functions(program: LoweredProgram, rank_program: RankProgram) -> list[str]:
    """The lines of all functions."""
    train = StepWriter(program, rank_program)
    if not train.stages:
        step = "Send parameters to the workers and leave the sum of their gradients in `.grad`."
        loss = "Send parameters to the workers, which compute the loss of one batch."
    else:
        step = f"Forward and backward of one batch; the gradients {_where(train.stages)}."
        loss = "The loss of one batch, forward only."
    lines = train.function("step", step)
    if program.plan.rounds:
        lines += ["", "", *train.round_function("begin_round", "Before the first step of a round.", When.BEFORE_ROUND)]
        lines += ["", "", *train.after_update(program.plan.rounds)] if program.plan.rounds.in_turns else []
        lines += [
            "",
            "",
            *train.round_function("end_round", "At the end of a round, and of training.", When.AFTER_ROUND),
        ]
    return [*lines, "", "", *_evaluate(program, rank_program, loss), "", "", *_predict(program, rank_program)]


def _evaluate(program: LoweredProgram, rank_program: RankProgram, doc: str) -> list[str]:
    """The lines of `evaluate`."""
    if isinstance(evaluated := program.evaluated, Refusal):
        return ["def evaluate(*_):", '    """Refused; rankN.py says why."""', "    raise NotImplementedError"]
    writer = StepWriter(evaluated, evaluated.rank_program(rank_program.ranks[0]), trains=False)
    return writer.function("evaluate", doc)


def _predict(program: LoweredProgram, rank_program: RankProgram) -> list[str]:
    """The lines of `predict`."""
    if isinstance(predicted := program.predicted, Refusal):
        return ["def predict(*_):", '    """Refused; rankN.py says why."""', "    raise NotImplementedError"]
    writer = StepWriter(predicted, predicted.rank_program(rank_program.ranks[0]), trains=False, trained=rank_program)
    if any(stage.has_loss for stage in writer.stages):
        doc = "The model's output for this rank's examples, forward only."
    elif writer.stages:
        doc = "This rank's part of the model's output, which the readers receive."
    else:
        doc = "Send parameters to the workers, which compute the model's output."
    return writer.function("predict", doc)


def _where(stages: Sequence[Stage]) -> str:
    """Where a step leaves the gradients."""
    summed = ", summed" if any(stage.buckets for stage in stages) else ""
    if any(stage.served for stage in stages):
        return f"are left in `.grad`{summed}, or go to the servers" if summed else "go to the servers"
    return f"are left in `.grad`{summed}"
