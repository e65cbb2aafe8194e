"""The table of operations: adjoints, bytes, and that every row of it is what ranks do."""

from __future__ import annotations

import pytest

from splitc.ir.actions import VERBS
from splitc.ir.comm_ops import NODES, OPS, Collective, CommOp, op_of
from splitc.ir.program import LoweredProgram
from splitc.ir.wire import inside, of_action
from tests.support.every_strategy import every_strategy, planned

COMMUNICATING = {name for name, op in OPS.items() if op.collective is not Collective.NONE}
DONE_IN_BACKWARD = {"shard_grad": "shard", "gather_errors": "late_multiply"}
"""Operations that are neither nodes nor actions -> the node whose backward they are."""


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.adjoint is not None], ids=lambda op: op.name)
def test_the_adjoint_of_the_adjoint_is_the_operation(op: CommOp) -> None:
    assert op.adjoint is not None
    adjoint = OPS[op.adjoint]
    assert adjoint.adjoint == op.name
    assert (adjoint.over, adjoint.dim) == (op.over, op.dim)
    assert (op.backward(), adjoint.backward()) == (adjoint.collective, op.collective)


def test_only_a_reduce_scatter_is_saved_where_all_ranks_have_the_same_gradient() -> None:
    for op in OPS.values():
        saved = op.backward() is Collective.REDUCE_SCATTER
        assert op.backward(partial=False) is (Collective.NONE if saved else op.backward())


def test_every_operation_is_a_node_an_action_or_the_backward_of_a_node() -> None:
    nodes = {op.name for op in NODES.values()}
    assert OPS.keys() == nodes | (OPS.keys() & VERBS.keys()) | DONE_IN_BACKWARD.keys()
    assert all(function.__name__ == op.name for function, op in NODES.items())


@pytest.mark.parametrize(
    ("collective", "sent"),
    [
        (Collective.SEND, 12),
        (Collective.RECV, 0),
        (Collective.NONE, 0),
        (Collective.ALL_GATHER, 3 * 12),
        (Collective.REDUCE_SCATTER, 48 - 12),
        (Collective.ALL_REDUCE, 2 * 3 / 4 * 48),
    ],
)
def test_the_bytes_that_a_rank_of_four_sends(collective: Collective, sent: float) -> None:
    assert collective.sent(48, 12, 4) == sent


def operations_of(program: LoweredProgram, rank: int) -> set[str]:
    """The operations with which a rank puts something on the wire in a step."""
    done: set[str] = set()
    for action in program.rank_program(rank).actions:
        if action.verb in ("forward", "backward"):
            for node, _ in inside(program, program.stage(action.role), rank, action):
                op = op_of(node)
                assert op is not None
                done.add(op.name if action.verb == "forward" else str(op.adjoint))
        elif any(True for _ in of_action(program, rank, action)):
            done.add(action.verb)
    return done


def test_every_communicating_operation_is_done_by_a_strategy() -> None:
    """`test_wire` counts the bytes of such programs at a transport, which holds each row of the table to account."""
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
    programs.append(planned(3, "data_parallel(sync_batchnorm=True)", norm=True).program)
    done = {name for program in programs for rank in range(program.plan.world) for name in operations_of(program, rank)}
    assert done | {"all_reduce_scalar", "all_reduce_tied"} >= COMMUNICATING, COMMUNICATING - done
