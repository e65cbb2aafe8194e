"""The plan: shares, who serves whom, routes, and what its text keeps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from splitc.errors import LaunchError
from splitc.plan import Placement, Plan, serve, share_out


def plan(n_c: int, n_f: int, batch: int) -> Plan:
    conv = share_out(batch, n_c)
    return Plan(
        strategy="layer_separation",
        world=n_c + n_f,
        roles={"conv": tuple(range(n_c)), "fc": tuple(range(n_c, n_c + n_f))},
        placements={"a": Placement("conv", "replicated", "all_reduce"), "b": Placement("fc", "replicated", "none")},
        examples={"conv": conv, "fc": serve(conv, n_f)},
        cluster="none",
    )


def test_shares_are_nearly_equal_and_the_first_are_the_larger() -> None:
    assert share_out(10, 3) == (0, 4, 7, 10)
    assert share_out(2, 3) == (0, 1, 2, 2)


@pytest.mark.parametrize(("producers", "servers", "expected"), [
    ((0, 4, 8, 12), 1, (0, 12)),
    ((0, 4, 8, 12), 2, (0, 8, 12)),
    ((0, 4, 8, 12, 16), 2, (0, 8, 16)),
    ((0, 6), 4, (0, 2, 4, 5, 6)),
])  # fmt: skip
def test_a_server_takes_whole_producers_while_there_are_enough(
    producers: tuple[int, ...], servers: int, expected: tuple[int, ...]
) -> None:
    assert serve(producers, servers) == expected


@pytest.mark.parametrize(("n_c", "n_f", "batch"), [(3, 1, 10), (2, 3, 7), (5, 2, 13), (1, 4, 9), (4, 4, 4)])
def test_routes_cover_every_example_once_and_both_sides_agree(n_c: int, n_f: int, batch: int) -> None:
    made = plan(n_c, n_f, batch)
    sent = [(rank, peer, a, b) for rank in made.roles["conv"] for peer, a, b in made.routes(rank, "fc")]
    received = [(peer, rank, a, b) for rank in made.roles["fc"] for peer, a, b in made.routes(rank, "conv")]
    assert sorted(sent) == sorted(received)
    covered = sorted(example for _, _, a, b in sent for example in range(a, b))
    assert covered == list(range(batch))
    for rank in range(made.world):
        start, stop = made.interval(rank)
        other = "fc" if rank in made.roles["conv"] else "conv"
        parts = [(a, b) for _, a, b in made.routes(rank, other)]
        assert parts[0][0] == start and parts[-1][1] == stop
        assert all(left[1] == right[0] for left, right in pairwise(parts))


def test_a_plan_reads_back_from_its_text() -> None:
    made = plan(3, 2, 11)
    assert Plan.from_json(made.to_json()) == made
    assert made.sizes == (4, 4, 3) and made.reader == "conv" and made.global_batch == 11


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"schema": 1, "hash": "x"}', '{"schema": 2, "hash": "x"}'])
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=r"compile (again|the model again)"):
        Plan.from_json(text)
