"""The table of operations: bytes, and that every row of it is what ranks do."""

from __future__ import annotations

import pytest

from splitc.ir.comm_ops import NODES
from splitc.ir.graph import op_name
from splitc.ir.placements import Placement
from splitc.ir.program import LoweredProgram
from splitc.ir.schedule.verb import Among
from splitc.ir.schedule.verbs import VERBS
from splitc.ir.transitions import TRANSITIONS, Collective
from splitc.ir.wire import inside, of_action
from tests.support.every_strategy import every_strategy, planned

NOTHING = Collective.NONE
COMMUNICATING = {
    *(node.__name__ for node, op in NODES.items() if op.in_stage and {op.collective, op.backward} != {NOTHING}),
    *(verb for verb, row in VERBS.items() if row.among not in (Among.NONE, Among.STAGE, Among.GROUP)),
} - {"average", "deal", "fetch_ahead", "collect"}


def test_every_transition_is_a_node_of_a_stage_over_its_group() -> None:
    ops = [NODES[function] for function in TRANSITIONS]
    assert all(op.in_stage and op.among is Among.GROUP and op.backward is NOTHING for op in ops)


def test_the_bytes_that_a_rank_of_four_sends() -> None:
    of = Collective
    sent = {of.SEND: 12, of.RECV: 0, of.NONE: 0, of.ALL_GATHER: 3 * 12, of.REDUCE_SCATTER: 48 - 12, of.ALL_REDUCE: 72}
    assert {each: each.sent(48, 12, 4) for each in sent} == sent


def operations_of(program: LoweredProgram, rank: int) -> set[str]:
    """The operations with which a rank puts something on the wire in a step."""
    done: set[str] = set()
    for action in program.rank_program(rank).actions:
        if action.verb in ("forward", "backward"):
            done |= {op_name(node) for node, _ in inside(program, program.stage(action.role), rank, action)}
        elif any(True for _ in of_action(program, rank, action)):
            done.add(action.verb)
    return done


@pytest.mark.slow
def test_every_communicating_operation_is_done_by_a_strategy() -> None:
    """`test_wire` counts the bytes of such programs at a transport, which holds each row of the table to account."""
    own = {layer: Placement(holding="sharded", group=2, split="rows", state="batch") for layer in ("fc6", "fc7")}
    strategies = (
        "late_multiply of all",
        "sharded, late, one rank",
        "sharded, then all ranks",
        "modulo_shard(mp=2,scheme=BK)",
        "parameter_server",
    )
    asked = [each for each in every_strategy(4) if str(each) in strategies or "with rows" in str(each)]
    assert len(asked) == 6
    programs = [planned(4, each).program for each in asked]
    programs.append(planned(2, "mixed", pins={"fc8": Placement(group=2, state="batch"), **own}).program)
    programs.append(planned(3, "data_parallel(sync_batchnorm=True)", norm=True).program)
    done = {name for program in programs for rank in range(program.plan.world) for name in operations_of(program, rank)}
    of_classes = {"cross_entropy", "linear_cross_entropy", "logsumexp"}
    others = {"all_reduce_scalar", "all_reduce_tied", "late_embedding", "late_embedding_bag", "gather_indices"}
    assert done | of_classes | others >= COMMUNICATING, COMMUNICATING - done - of_classes - others
