"""The rows that servers hold, and the messages between parameter servers and their workers."""

from __future__ import annotations

from collections import Counter

from splitc.ir.program import LoweredProgram
from splitc.ir.schedule.actions import Action
from splitc.ir.servers.wire import messages, pieces, server_ops, worker_ops
from splitc.ir.wire_op import WireOp
from splitc.passes.rewriting import lower
from tests.support.pair import analysed_pair, placed_pair


def served() -> LoweredProgram:
    """Ranks 0 and 1 work, 2 and 3 serve."""
    return lower(placed_pair(4, "parameter_server(servers=2)"))


def of_worker(program: LoweredProgram, rank: int, verb: str) -> list[WireOp]:
    action = Action(verb, role="worker", bucket=0 if verb == "push" else None)
    return list(worker_ops(program, rank, action))


def of_server(program: LoweredProgram, rank: int, verb: str) -> list[WireOp]:
    return list(server_ops(program, rank, Action(verb, role="server")))


def test_each_message_of_a_worker_meets_one_of_a_server() -> None:
    for worker_verb, server_verb in [("pull", "send_parameters"), ("push", "reduce_gradients")]:
        program = served()
        workers = Counter(
            (rank, *op.ranks, op.payload) for rank in (0, 1) for op in of_worker(program, rank, worker_verb)
        )
        servers = Counter(
            (*op.ranks, rank, op.payload) for rank in (2, 3) for op in of_server(program, rank, server_verb)
        )
        assert workers == servers and workers.total() >= 4


def test_small_pieces_of_a_server_travel_in_one_message() -> None:
    program = served()
    (bucket,) = program.stage("worker").served
    assert [[piece.server for piece in message] for message in messages(program, bucket)] == [[2, 2, 2], [3]]
    assert [str(op) for op in of_worker(program, 0, "push")] == [
        "send push b.bias[0:5] and 2 more (41,) torch.float32 to 2",
        "send push a.weight[0:6] (6, 8) torch.float32 to 3",
    ]


def test_a_worker_pushes_every_gradient_once() -> None:
    program = served()
    numbers = sum(tensor.numel for tensor in program.tensors.values())
    assert sum(op.sent for op in of_worker(program, 0, "push")) == 4 * numbers
    assert sum(op.sent for op in of_worker(program, 0, "pull")) == 0


def test_the_bytes_of_a_bucket_are_cut_into_equal_ranges_of_whole_rows() -> None:
    program = analysed_pair()  # b.bias: 5 rows of 4 bytes, b.weight: 5 rows of 24 bytes
    found = [(p.name, p.server, p.first, p.last) for p in pieces(program, ("b.bias", "b.weight"), (7, 8))]
    assert found == [("b.bias", 7, 0, 5), ("b.weight", 7, 0, 2), ("b.weight", 8, 2, 5)]


def test_more_servers_than_rows_leave_some_without() -> None:
    held = pieces(analysed_pair(), ("b.bias",), range(9))
    assert [p.last - p.first for p in held] == [1] * 5 and sum(p.nbytes for p in held) == 20
