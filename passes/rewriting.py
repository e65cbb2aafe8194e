"""The passes that turn a placed program into one for each role, in reading order."""

from __future__ import annotations

from functools import reduce

from splitc.ir.pass_manager import Pass, Watcher, run_pass, run_passes
from splitc.ir.program import LoweredProgram, PlacedProgram
from splitc.passes.assign_states import AssignStates
from splitc.passes.bucket_gradients import BucketGradients
from splitc.passes.divide_roles import DivideRoles
from splitc.passes.features import features
from splitc.passes.insert_comm import InsertComm
from splitc.passes.late_multiply import LateMultiply
from splitc.passes.scale_loss import ScaleLoss
from splitc.passes.schedule import Schedule
from splitc.passes.split_ranks import SplitRanks
from splitc.passes.synchronise_norms import SynchroniseNorms

ON_THE_GRAPH: tuple[Pass[PlacedProgram, PlacedProgram], ...] = (
    ScaleLoss(),
    InsertComm(),
    AssignStates(),
    LateMultiply(),
    SynchroniseNorms(),
)
"""Passes that rewrite the one graph of all roles, of training and of evaluation."""

ON_THE_STAGES: tuple[Pass[LoweredProgram, LoweredProgram], ...] = (
    *(each for feature in features() for each in feature.on_stages),
    BucketGradients(),
    *(each for feature in features() for each in feature.with_buckets),
    Schedule(),
)
"""Passes that rewrite the stages, after `SplitRanks`."""


def lower(program: PlacedProgram, watch: Watcher | None = None) -> LoweredProgram:
    """Run all of them, with their checks."""
    program = run_passes(program, (*ON_THE_GRAPH, DivideRoles()), watch)
    return run_passes(run_pass(SplitRanks(), program, watch), ON_THE_STAGES, watch)


def lower_unchecked(program: PlacedProgram) -> LoweredProgram:
    """Run all of them without checks: for a plan that is only priced, of which nothing is written or run."""
    program = reduce(lambda given, each: each.run(given), (*ON_THE_GRAPH, DivideRoles()), program)
    return reduce(lambda given, each: each.run(given), ON_THE_STAGES, SplitRanks().run(program))
