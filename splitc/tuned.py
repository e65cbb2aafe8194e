"""Choose a plan by running the finalists on the ranks that are there, and keep what they did."""

from __future__ import annotations

import copy
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from splitc.codegen.generate import generate
from splitc.cost_models.calibration.record import Seen, seen_in
from splitc.ir.disk_cache import digest_of, keep, recall
from splitc.ir.plan import Plan
from splitc.ir.prediction import Tried
from splitc.ir.program import LoweredProgram
from splitc.ir.regions import regions
from splitc.runtime.launch.loader import by_rank_0, load_rank
from splitc.runtime.transport.base import Transport
from splitc.runtime.tuning import Finalist, fastest, outcome, rows_of, tune
from splitc.runtime.worker import Worker

FINALISTS = 6
"""How many plans are run, at most."""


class Tunable(Protocol):
    """A compiled program, as tuning sees it.

    tensors: the example's, by name.  own: the user's model and loss.  state: the model's, this rank's own.
    """

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    @property
    def own(self) -> Mapping[str, Any]: ...
    @property
    def state(self) -> Mapping[str, Tensor]: ...
    def weights(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What weights.pt holds."""

    def request(self) -> str:
        """What the choice follows from, but the hosts."""

    def finalists(self, number: int) -> list[LoweredProgram]:
        """Programs of different plans that may be the fastest, its own first."""

    def following(self, plan: Plan) -> LoweredProgram:
        """The program of a plan."""

    def learn(self, program: LoweredProgram, ran: Seen) -> None:
        """Record what was measured of a finalist."""


def tuned(
    asked: Tunable, transport: Transport, make: Callable[..., Worker], budget: float
) -> tuple[Plan, LoweredProgram | None]:
    """The fastest of the finalists, as they run here, and on rank 0 its program.  Collective.

    make: a Worker with all arguments but program, transport and weights.  Weights and the user's objects stay as they
    are.  budget: seconds, about.  What was the fastest on these hosts is taken at once.
    """
    hosts = transport.all_gather_objects(socket.gethostname())
    programs: list[LoweredProgram] = []

    def found() -> Any:
        if (plan := known(asked, hosts)) is not None:
            programs.append(asked.following(plan))
            return None
        programs.extend(asked.finalists(FINALISTS))
        own_code = any(True for program in programs for _ in regions(program))
        return [(finalist_of(each), generate(each)) for each in programs], asked.weights()["extra"], own_code

    if (said := by_rank_0(transport, "plan what to tune", found)) is not None:
        listed, extra, own_code = said
        finalists = [each for each, _ in listed]
        own = copy.deepcopy(dict(asked.own)) if own_code else asked.own

        def made(k: int, trial: Transport) -> tuple[Worker, tuple[Tensor, ...]]:
            module = load_rank(listed[k][1], trial.rank, own)
            return make(module, trial, {**asked.state, **extra}), rows_of(module.rank, dict(asked.tensors))

        tune(transport, finalists, made, budget)
        if transport.rank == 0:
            programs = [chosen(asked, programs, finalists, hosts)]
    program = programs[0] if transport.rank == 0 else None
    return Plan.from_json(transport.broadcast_object(program and program.plan.to_json())), program


def chosen(
    asked: Tunable, programs: Sequence[LoweredProgram], finalists: Sequence[Finalist], hosts: Sequence[str]
) -> LoweredProgram:
    """The program that was the fastest, which is remembered for these hosts; the record learns from all."""
    for program, each in zip(programs, finalists, strict=True):
        if each.rate:
            seen = seen_in(each.steps, program.plan.period) if any(each.steps) else Seen(0.0)
            asked.learn(program, replace(seen, step=statistics.median(each.seconds)))
    tried = tuple(
        Tried(each.name, program.plan.hash, each.examples, each.predicted, **outcome(each))
        for program, each in zip(programs, finalists, strict=True)
    )
    best = programs[fastest(finalists)]
    best = replace(best, plan=replace(best.plan, prediction=replace(best.plan.prediction, tried=tried)))
    keep("tuned", _key(asked, hosts), best.plan.to_json())
    return best


def known(asked: Tunable, hosts: Sequence[str]) -> Plan | None:
    """The plan that was the fastest on these hosts; None before one was."""
    kept = recall("tuned", _key(asked, hosts))
    return None if kept is None else Plan.from_json(kept)


def _key(asked: Tunable, hosts: Sequence[str]) -> str:
    return digest_of(asked.request(), repr(list(hosts)), str(torch.get_num_threads()))


def finalist_of(program: LoweredProgram) -> Finalist:
    """A program as what is to be run."""
    plan = program.plan
    return Finalist(title(plan), plan.global_batch, plan.step_seconds, plan.period * plan.accumulate)


def title(plan: Plan) -> str:
    """A plan in a few words: `layer_separation 3 + 1, 4 microbatches`."""
    parts = [f"{plan.strategy} {' + '.join(str(len(ranks)) for ranks in plan.decided.roles.values())}"]
    parts += [f"groups of {size}" for size in sorted({each.size for each in plan.groups.values() if each.size > 1})]
    parts += [f"{plan.microbatches} microbatches"] * (plan.microbatches > 1)
    return ", ".join(parts)
