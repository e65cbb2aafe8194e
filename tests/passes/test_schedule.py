"""Schedule: the action list of each rank program."""

from __future__ import annotations

from textwrap import dedent

from splitc.ir.placements import Placement
from splitc.ir.schedule.actions import print_actions
from splitc.passes.schedule import Schedule
from tests.support.pair import placed_pair
from tests.support.printed import program_after, program_before

COLUMNS = Placement(holding="sharded", group=2, split="columns")


def scheduled(world: int, strategy: str, **pins: str | Placement) -> str:
    """Print the action lists of the pair, the ranks of each above it."""
    program = placed_pair(world, strategy, pins)
    assert all(not each.actions for each in program_before(Schedule, program).rank_programs)
    return "".join(
        f"# ranks {', '.join(map(str, each.ranks))}\n{print_actions(each.actions)}"
        for each in program_after(Schedule, program).rank_programs
    ).rstrip()


SCHEDULES = [
    (
        2,
        "data_parallel",
        """\
        # ranks 0, 1
        all: forward
        all: sum_loss
        all: backward
        all: all_reduce bucket0""",
    ),
    (
        3,
        "layer_separation(n_c=2, n_f=1)",
        """\
        # ranks 0, 1
        trunk: send target -> head
        trunk: forward
        trunk: send cut0 -> head
        trunk: sum_loss
        trunk: recv_grad cut0 <- head
        trunk: backward
        trunk: all_reduce bucket0
        # ranks 2
        head: recv target <- trunk
        head: recv cut0 <- trunk
        head: forward
        head: sum_loss
        head: backward
        head: send_grad cut0 -> trunk""",
    ),
    (
        2,
        "hybrid_single",
        """\
        # ranks 1
        trunk: send target -> head
        trunk: forward
        trunk: send cut0 -> head
        trunk: sum_loss
        trunk: recv_grad cut0 <- head
        trunk: backward
        trunk: all_reduce bucket0
        # ranks 0
        trunk: send target -> head
        head: recv target <- trunk
        trunk: forward
        trunk: send cut0 -> head
        head: recv cut0 <- trunk
        head: forward
        head: sum_loss
        head: backward
        head: send_grad cut0 -> trunk
        trunk: recv_grad cut0 <- head
        trunk: backward
        trunk: all_reduce bucket0""",
    ),
    (
        3,
        "parameter_server(servers=1)",
        """\
        # ranks 0, 1
        worker: pull
        worker: forward
        worker: sum_loss
        worker: backward
        worker: push bucket0
        # ranks 2
        server: send_parameters
        server: sum_loss
        server: reduce_gradients""",
    ),
    (
        2,
        "late_multiply",
        """\
        # ranks 0, 1
        all: forward
        all: sum_loss
        all: backward
        all: multiply""",
    ),
]


def test_forward_goes_through_the_roles_and_backward_returns() -> None:
    for world, strategy, expected in SCHEDULES:
        assert scheduled(world, strategy) == dedent(expected), strategy


def test_the_stage_of_the_loss_runs_once_for_each_microbatch_of_its_groups_and_may_update_in_each() -> None:
    pins = {"b": COLUMNS, "a": Placement(role="trunk")}
    once = scheduled(2, "modulo_shard(mp=2, scheme=B/K)", **pins)
    assert once == dedent("""\
        # ranks 0, 1
        trunk: forward
        head: modulo target
        head: modulo cut0
        head: forward
        head: backward
        head: modulo_grad cut0
        head: modulo target [1]
        head: modulo cut0 [1]
        head: forward [1]
        head: backward [1]
        head: modulo_grad cut0 [1]
        head: sum_loss
        trunk: backward
        trunk: all_reduce bucket0""")
    every = once.replace("modulo_grad cut0\n", "modulo_grad cut0\nhead: update\n")
    every = every.replace("modulo_grad cut0 [1]\n", "modulo_grad cut0 [1]\nhead: update [1]\n")
    assert scheduled(2, "modulo_shard(mp=2, scheme=B/K, updates=every)", **pins) == every
