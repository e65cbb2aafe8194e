"""Choose a plan by running the finalists on the ranks that are there, and keep what they did."""

from __future__ import annotations

import copy
import hashlib
import socket
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from splitc.capture.example.example import LOSS, Example
from splitc.codegen.generate import generate
from splitc.codegen.rank_weights import whole_state
from splitc.cost_models.calibration.rank_timer import no_progress
from splitc.cost_models.calibration.record import Seen, remember, seen_in
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import PlacementError
from splitc.ir.autocast import under_autocast
from splitc.ir.cluster_file import base_digest, digest
from splitc.ir.disk_cache import digest_of, keep, recall
from splitc.ir.plan import Plan
from splitc.ir.prediction import Tried
from splitc.ir.program import LoweredProgram, Program
from splitc.ir.regions import regions
from splitc.passes.analysis import fingerprint
from splitc.passes.planner.strategy import parse_strategy
from splitc.runtime.launch.loader import by_rank_0, load_rank
from splitc.runtime.own_code import plain_tensors
from splitc.runtime.transport.base import Transport
from splitc.runtime.tuning import Finalist, fastest, outcome, rows_of, tune
from splitc.runtime.worker import Worker
from splitc.specialise import Settings, specialised

FINALISTS = 6
"""How many plans are run, at most."""


@dataclass(frozen=True)
class Request:
    """What a plan is asked for: a model with its example, and settings.

    program: gives that of the plan that was chosen by its price.  analysed: gives what plans are made of.  given: a
    plan to follow.
    """

    program: Callable[[], LoweredProgram]
    analysed: Callable[[], Program]
    settings: Settings
    model: nn.Module
    example: Example
    given: Plan | None = None

    @property
    def own(self) -> dict[str, Any]:
        """The user's model and loss, of which stages take regions in memory."""
        return {"model": self.model, LOSS: self.example.loss}

    def weights(self, program: LoweredProgram) -> dict[str, dict[str, Tensor]]:
        """The contents of weights.pt: `state`, the model's state_dict, and `extra`, tensors that are not in it."""
        state, loss, of_loss = whole_state(program, self.model), self.example.loss, dict[str, Tensor]()
        constants = dict(named for root in program.roots for named in root.named_buffers(recurse=False))  # of no module
        if isinstance(loss, nn.Module):
            of_loss = {**plain_tensors(loss, LOSS), **dict(loss.named_buffers(prefix=LOSS))}
        buffers = {**constants, **plain_tensors(self.model), **of_loss, **dict(self.model.named_buffers())}
        return {"state": state, "extra": {name: buffers[name] for name in program.tensors if name not in state}}

    def finalists(self, number: int = FINALISTS) -> list[LoweredProgram]:
        """Programs of different plans that may be the fastest, its own first; those that fit into memory."""
        program, found = self.analysed(), [self.program()]
        with under_autocast(program.root, program.autocast):
            plans = self.settings.place(fingerprint(program)).finalists(program, number)
        for plan in plans:
            if plan.hash not in [each.plan.hash for each in found]:
                with suppress(PlacementError):
                    found.append(self.following(plan))
        return found

    def following(self, plan: Plan) -> LoweredProgram:
        """The program of a plan."""
        return specialised(self.analysed(), self.settings, plan, None, no_progress)

    def known(self, hosts: Sequence[str]) -> Plan | None:
        """The plan that was the fastest on these hosts; None before one was."""
        kept = recall("tuned", self._key(hosts))
        return None if kept is None else Plan.from_json(kept)

    def chosen(
        self, programs: Sequence[LoweredProgram], finalists: Sequence[Finalist], hosts: Sequence[str]
    ) -> LoweredProgram:
        """The program that was the fastest, which is remembered for these hosts; the record learns from all."""
        source = self.settings.cluster
        path, cluster = source if isinstance(source, str | Path) else None, load_cluster(source)
        for program, each in zip(programs, finalists, strict=True):
            if each.rate:
                seen = seen_in(each.steps, program.plan.period) if any(each.steps) else Seen(0.0)
                remember(path, cluster, program.plan, replace(seen, step=statistics.median(each.seconds)), program.name)
        tried = tuple(
            Tried(each.name, program.plan.hash, each.examples, each.predicted, **outcome(each))
            for program, each in zip(programs, finalists, strict=True)
        )
        best = programs[fastest(finalists)]
        best = replace(best, plan=replace(best.plan, prediction=replace(best.plan.prediction, tried=tried)))
        keep("tuned", self._key(hosts), best.plan.to_json())
        return best

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits of all that the report follows from, names and places of files aside; alike everywhere."""
        asked, plan = self.settings, self.given
        settings = replace(asked, cluster=None, tune=0.0, code=None, strategy=parse_strategy(asked.strategy))
        cluster = load_cluster(asked.cluster) if plan is None or asked.cluster is not None else None
        numbers = cluster and (digest(cluster), [cluster.device_of(k, asked.world).memory for k in range(asked.world)])
        text = f"{fingerprint(self.analysed())} {settings} {numbers} {plan and plan.hash}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _key(self, hosts: Sequence[str]) -> str:
        """What the choice follows from: model and batch, settings, the cluster as it was described, and the hosts."""
        settings = replace(self.settings, cluster=None, tune=0.0)
        cluster = base_digest(load_cluster(self.settings.cluster, learns=False))
        text = f"{fingerprint(self.analysed())} {settings} {cluster}"
        return digest_of(text, repr(list(hosts)), str(torch.get_num_threads()))


def tuned(
    asked: Request, transport: Transport, make: Callable[..., Worker], budget: float
) -> tuple[Plan, LoweredProgram | None]:
    """The fastest of the finalists, as they run here, and on rank 0 its program.  Collective.

    make: a Worker with all arguments but program, transport and weights.  Weights and the user's objects stay as they
    are.  budget: seconds, about.  What was the fastest on these hosts is taken at once.
    """
    hosts = transport.all_gather_objects(socket.gethostname())
    programs: list[LoweredProgram] = []

    def found() -> Any:
        if (plan := asked.known(hosts)) is not None:
            programs.append(asked.following(plan))
            return None
        programs.extend(asked.finalists(FINALISTS))
        own_code = any(True for program in programs for _ in regions(program))
        return (
            [(finalist_of(each), generate(each)) for each in programs],
            asked.weights(asked.program())["extra"],
            own_code,
        )

    if (said := by_rank_0(transport, "plan what to tune", found)) is not None:
        listed, extra, own_code = said
        finalists = [each for each, _ in listed]
        own, tensors = copy.deepcopy(asked.own) if own_code else asked.own, asked.example.tensors

        def made(k: int, trial: Transport) -> tuple[Worker, tuple[Tensor, ...]]:
            module = load_rank(listed[k][1], trial.rank, own)
            return make(module, trial, {**asked.model.state_dict(), **extra}), rows_of(module.rank, tensors)

        tune(transport, finalists, made, budget)
        if transport.rank == 0:
            programs = [asked.chosen(programs, finalists, hosts)]
    program = programs[0] if transport.rank == 0 else None
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
