"""Choose a plan by running the finalists on the ranks that are there, and keep what they did."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from splitc.codegen.generate import generate
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


def tuned(
    transport: Transport,
    find: Callable[[], Sequence[LoweredProgram]],
    make: Callable[..., Worker],
    own: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    extra: Callable[[], Mapping[str, Tensor]],
    budget: float,
) -> tuple[Plan, LoweredProgram | None]:
    """The fastest of the plans that rank 0 finds, as they run here, and on rank 0 its program.  Collective.

    make: a Worker with all arguments but program, transport and weights.  own: the user's model and loss, which trials
    do not change.  tensors: the example's, by name.  weights: of the whole model, this rank's own; extra: rank 0's that
    no state_dict has.  budget: seconds, about.  Who ran here before, on these hosts, is not run again.
    """
    hosts = transport.all_gather_objects(socket.gethostname())
    programs: list[LoweredProgram] = []

    def found() -> Any:
        programs.extend(find())
        if (at := known(programs, hosts)) is not None:
            return at
        own_code = any(True for program in programs for _ in regions(program))
        return [(finalist_of(each), generate(each)) for each in programs], extra(), own_code

    said = by_rank_0(transport, "plan what to tune", found)
    if not isinstance(said, int):
        listed, more, own_code = said
        finalists = [each for each, _ in listed]
        mine = copy.deepcopy(dict(own)) if own_code else own

        def made(k: int, trial: Transport) -> tuple[Worker, tuple[Tensor, ...]]:
            module = load_rank(listed[k][1], trial.rank, mine)
            return make(module, trial, {**weights, **more}), rows_of(module.rank, dict(tensors))

        tune(transport, finalists, made, budget)
        if transport.rank == 0:
            programs[:] = with_results(programs, finalists)
            remember(programs, hosts, at := fastest(finalists))
            said = at
    program = programs[said] if transport.rank == 0 else None
    return Plan.from_json(transport.broadcast_object(program and program.plan.to_json())), program


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


def with_results(programs: Sequence[LoweredProgram], finalists: Sequence[Finalist]) -> list[LoweredProgram]:
    """The programs, whose plans say how all of them ran."""
    tried = tuple(
        Tried(each.name, program.plan.hash, each.examples, each.predicted, **outcome(each))
        for program, each in zip(programs, finalists, strict=True)
    )
    return [_noting(program, tried) for program in programs]


def _noting(program: LoweredProgram, tried: tuple[Tried, ...]) -> LoweredProgram:
    return replace(program, plan=replace(program.plan, prediction=replace(program.plan.prediction, tried=tried)))


def remember(programs: Sequence[LoweredProgram], hosts: Sequence[str], at: int) -> None:
    """Keep which program was the fastest on these hosts, and how all of them ran."""
    tried = programs[at].plan.prediction.tried
    keep("tuned", _key(programs, hosts), {"fastest": at, "plan": programs[at].plan.to_json()} if tried else None)


def known(programs: list[LoweredProgram], hosts: Sequence[str]) -> int | None:
    """The position of the program that was the fastest on these hosts, which gets what is known; None before that."""
    if (kept := recall("tuned", _key(programs, hosts))) is None:
        return None
    tried = Plan.from_json(kept["plan"]).prediction.tried
    programs[:] = [_noting(program, tried) for program in programs]
    return int(kept["fastest"])


def _key(programs: Sequence[LoweredProgram], hosts: Sequence[str]) -> str:
    plans = [(each.plan.hash, each.plan.prediction.priced_on) for each in programs]
    return digest_of(repr(plans), repr(list(hosts)), str(torch.get_num_threads()))
