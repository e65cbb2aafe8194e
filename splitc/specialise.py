"""Specialise an analysed model for the ranks of a cluster: decide a plan, and rewrite the program into its roles."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial, reduce
from pathlib import Path

import torch
from torch import nn

from splitc.checks.batch_sizes import require_batch_sizes
from splitc.cost_models.calibration.rank_timer import Progress, no_progress
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.memory.memory_check import most_memory_on, require_memory_on
from splitc.errors import InternalError, LaunchError, PlacementError, bullets
from splitc.features import parts
from splitc.ir.autocast import under_autocast
from splitc.ir.cluster import Cluster
from splitc.ir.pass_manager import Watcher, run_pass
from splitc.ir.placements import Placement
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram, PlacedProgram, Program
from splitc.passes.analysis import fingerprint
from splitc.passes.lower_evaluation import with_evaluation
from splitc.passes.lower_outputs import with_outputs
from splitc.passes.place import Place, values_refused
from splitc.passes.planner.strategy import Strategy, parse_strategy
from splitc.passes.predict import Predict
from splitc.passes.rewriting import lower, lower_unchecked
from splitc.passes.share_forward import with_shared_forward
from splitc.passes.use_plan import UsePlan
from splitc.report.feasible import planned_anew, what_fits
from splitc.runtime.transport.formats import AS_COMPUTED, Wire


@dataclass(frozen=True)
class Settings:
    """The arguments of `compile` other than model and data.  code: where the model's Python is, see `OwnCode`.

    tune: seconds in which finalists are run to choose among them; 0: none is.
    free: the kinds of numbers that may travel in other formats than `wire`, for errors of gradients below `wire_error`.
    fewer_readers: as of `Place`.
    """

    world: int
    global_batch: int | None = None
    cluster: str | Path | Cluster | None = None
    strategy: str | Strategy | type[Strategy] = "auto"
    pins: Mapping[str, str | Placement] = field(default_factory=dict)
    memory: float | None = None
    autocast: torch.dtype | None = None
    code: str | None = None
    accumulate: int = 1
    tune: float = 0.0
    wire: Wire = AS_COMPUTED
    wire_error: float = 0.0
    free: tuple[str, ...] = ()
    fewer_readers: bool = False

    def __post_init__(self) -> None:
        if problems := values_refused(self):
            raise PlacementError(bullets("this cannot be planned:", problems))

    def place(self, model: str = "", kept: list[LoweredProgram] | None = None) -> Place:
        """The pass that chooses a plan for them.

        model: the fingerprint that goes into the plan.  kept: of the plans that it lowers to see whether they fit, the
        last one that does is left there; without it none of them is run, so they are not checked.
        """
        cluster, strategy = load_cluster(self.cluster), parse_strategy(self.strategy)

        def fits(program: Program, plan: Plan) -> bool:
            with suppress(PlacementError):
                lowered = _with_others((lower_unchecked if kept is None else lower)(program.placed(plan)), program)
                require_memory_on(lowered, cluster, self.memory)
                if kept is not None:
                    kept[:] = [lowered]
                return True
            return False

        place = partial(Place, cluster, self.world, strategy, self.pins, self.global_batch, self.memory)
        return place(
            model=model, accumulate=self.accumulate, wire=self.wire, fewer_readers=self.fewer_readers, fits=fits
        )


def with_norms(model: nn.Module, program: Program, world: int) -> nn.Module:
    """The model with the normalisations that a feature needs."""
    return reduce(
        lambda model, each: each.with_norms(model, program, world), parts("splitc.capture", "insert_norms"), model
    )


def inserts_norm(settings: Settings, plan: Plan | None) -> bool:
    """Whether the model is to be normalised (`with_norms`), before it is captured."""
    return parse_strategy(settings.strategy).inserts_norm if plan is None else plan.insert_norm


def specialise(
    program: Program,
    settings: Settings,
    plan: Plan | None = None,
    watch: Watcher | None = None,
    now: Progress = no_progress,
) -> LoweredProgram:
    """Decide a plan, or take the one given and price it on a cluster; rewrite a program into one for each role.

    now: as in `analyse`.  A PlacementError notes the smallest change to the request with which there is a plan.
    """

    def made(place: Place, program: Program) -> Plan:
        changed = {each.name: getattr(place, each.name) for each in fields(Settings) if hasattr(place, each.name)}
        return specialised(program, replace(settings, **changed), None, None, no_progress).plan

    try:
        return specialised(program, settings, plan, watch, now)
    except PlacementError as error:
        now("looking for what would make a plan of")
        with under_autocast(program.root, program.autocast), suppress(TimeoutError):
            if plan is None or settings.cluster is not None:
                find = what_fits if plan is None else partial(planned_anew, plan)
                if changes := find(settings.place(), program, made):
                    error.add_note(changes)
        raise


def specialised(
    program: Program, settings: Settings, plan: Plan | None, watch: Watcher | None, now: Progress
) -> LoweredProgram:
    model, kept = fingerprint(program), list[LoweredProgram]()
    with under_autocast(program.root, program.autocast):  # under which checks run the graph
        place = settings.place(model, kept) if plan is None else UsePlan(plan, model)
        asked = place.cluster if isinstance(place, Place) else settings.cluster
        cluster = None if asked is None else load_cluster(asked)
        if plan is not None and cluster and plan.world > (cluster.world or plan.world):
            raise PlacementError(
                f"the plan has {plan.world} ranks, but {cluster.name} has {cluster.world}; compile anew"
            )
        placed = run_pass(place, program, watch)
        is_kept = watch is None and any(each.plan.decided == placed.plan for each in kept)
        now("writing programs for")
        if is_kept:
            (lowered,) = kept
            lowered = replace(lowered, plan=replace(lowered.plan, prediction=placed.plan.prediction))
        else:
            lowered = _with_others(_lowered(placed, plan is not None, watch), program)
        if cluster:
            now("simulating")
            lowered = run_pass(Predict(cluster), lowered, watch)
    require_batch_sizes(lowered)
    if not is_kept:
        now("measuring the memory of")
        require_memory_on(lowered, cluster, settings.memory)
    if cluster is None:
        return lowered
    per_host = cluster.ranks_per_host or (lowered.plan.world if cluster.ranks_share_device else 1)
    most = most_memory_on(lowered, cluster, settings.memory)
    prediction = replace(lowered.plan.prediction, memory=most, ranks_per_host=per_host)
    return replace(lowered, plan=replace(lowered.plan, prediction=prediction))


def _lowered(placed: PlacedProgram, is_given: bool, watch: Watcher | None) -> LoweredProgram:
    """Lower a placed program; where its plan was given, it may be what is wrong."""
    try:
        return lower(placed, watch)
    except InternalError as error:
        if not is_given:
            raise
        why = "the plan's roles, examples, groups and placements contradict each other, or splitc has a bug, if the"
        raise LaunchError(f"{why} plan was not edited: {error}") from error


def _with_others(lowered: LoweredProgram, program: Program) -> LoweredProgram:
    """A lowered program with its evaluation and outputs.  program: what it was lowered from."""
    return with_shared_forward(with_outputs(with_evaluation(lowered, program), program))
