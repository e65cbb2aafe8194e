"""A whole state across ranks: gathered, spread and handed out, tensor by tensor."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitc.errors import LaunchError
from splitc.runtime.spec import Shard
from splitc.runtime.transport.base import Transport
from splitc.runtime.whole_state import broadcast_state, gather_holders, gather_state, in_memory
from tests.support.ranks import on_ranks
from tests.support.sampling import along, in_one

DTYPES = {"a": torch.float64, "b": torch.bfloat16, "c": torch.int64, "d": torch.bool}


def test_gathered_tensors_keep_their_dtypes_and_are_copies_on_rank_0() -> None:
    given = {name: torch.tensor([[0, 1], [1, 0]]).to(dtype) for name, dtype in DTYPES.items()}

    def run(transport: Transport) -> dict[str, Tensor] | None:
        own = {name: given[name] for k, name in enumerate(given) if k % 3 == transport.rank}
        return gather_state(transport, own, {}, in_memory)

    whole, *others = on_ranks(3, run)
    assert others == [None, None]
    assert whole is not None
    assert whole.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(whole[name], tensor)
        assert whole[name].data_ptr() != tensor.data_ptr()


def test_where_two_ranks_give_a_name_the_lower_rank_counts() -> None:
    whole, *_ = on_ranks(3, lambda t: gather_state(t, {"x": torch.tensor(t.rank)} if t.rank else {}, {}, in_memory))
    assert whole == {"x": torch.tensor(1)}


def stage_of(rank: int) -> nn.Module:
    """Rank 0 holds `first`, rank 1 `second`, rank 2 both; nobody `third`."""
    names = {0: ["first"], 1: ["second"], 2: ["first", "second"]}[rank]
    return nn.ModuleDict({name: nn.Linear(2, 3) for name in names})


def state() -> dict[str, Tensor]:
    return nn.ModuleDict({name: nn.Linear(2, 3) for name in ("first", "second", "third")}).state_dict()


def test_a_state_reaches_every_rank_that_holds_a_part_and_rank_0_keeps_what_nobody_holds() -> None:
    whole = state()

    def run(transport: Transport) -> dict[str, Tensor]:
        stage = stage_of(transport.rank)
        left = broadcast_state(transport, stage, whole if transport.rank == 0 else None, list(whole))
        for name, tensor in stage.state_dict().items():
            assert torch.equal(tensor, whole[name])
            assert tensor.data_ptr() != whole[name].data_ptr()
        assert all(p.requires_grad and p.is_leaf for p in stage.parameters())
        return left

    left, *others = on_ranks(3, run)
    assert others == [{}, {}]
    assert list(left) == ["third.weight", "third.bias"]
    assert torch.equal(left["third.bias"], whole["third.bias"])
    assert left["third.bias"].data_ptr() != whole["third.bias"].data_ptr()


def test_a_state_of_another_precision_is_cast_as_torch_casts_it() -> None:
    whole = {key: tensor.double() for key, tensor in state().items()}

    def run(transport: Transport) -> None:
        stage = stage_of(transport.rank)
        broadcast_state(transport, stage, whole, list(whole))
        for name, tensor in stage.state_dict().items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, whole[name].float())

    on_ranks(3, run)


def broken(**changes: Any) -> dict[str, Tensor]:
    changed = {**state(), **{key.replace("_", "."): value for key, value in changes.items()}}
    return {key: tensor for key, tensor in changed.items() if tensor is not None}


BROKEN = [
    (broken(second_weight=torch.zeros(7)), "second.weight: needs shape (3, 2), has (7,)"),
    (broken(second_weight=None), "second.weight: missing"),
    (broken(third_weight=None), "third.weight: missing"),
    (broken(fourth_weight=torch.zeros(1)), "fourth.weight: the model has no such key"),
]


def test_a_state_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing() -> None:
    def run(transport: Transport, given: dict[str, Tensor]) -> str:
        stage = stage_of(transport.rank)
        before = {name: tensor.clone() for name, tensor in stage.state_dict().items()}
        with pytest.raises(LaunchError) as caught:
            broadcast_state(transport, stage, given if transport.rank == 0 else None, list(state()))
        assert all(torch.equal(tensor, before[name]) for name, tensor in stage.state_dict().items())
        return str(caught.value)

    for given, problem in BROKEN:
        (text,) = set(on_ranks(3, partial(run, given=given)))
        assert text == f"the state_dict does not fit the model, and nothing was loaded:\n  - {problem}"


# -- parts of tensors --------------------------------------------------------------------------------------------------


def test_ranks_agree_on_who_holds_what_the_lowest_first() -> None:
    held: list[dict[str, Shard | None]] = [
        {"whole": None, "left": Shard(0, 0, 2)},
        {"left": Shard(0, 2, 3), "late": None},
        {},
        {"whole": None, "left": Shard(0, 0, 2), "late": None},
    ]
    table = {"whole": {None: (0, 3)}, "left": {Shard(0, 0, 2): (0, 3), Shard(0, 2, 3): (1,)}, "late": {None: (1, 3)}}
    assert on_ranks(4, lambda t: gather_holders(t, held[t.rank])) == [table] * 4
    assert held[0] == {"whole": None, "left": Shard(0, 0, 2)}


def shares_of(dim: int, *bounds: int) -> list[Shard]:
    return [Shard(dim, first, last) for first, last in pairwise(bounds)]


DIVIDED = [
    shares_of(0, 0, 2, 4, 6),  # equal
    shares_of(0, 0, 4, 5, 6),  # unequal
    shares_of(1, 0, 1, 3, 4),
    shares_of(1, 0, 2, 4, 4),  # the last one has nothing
    shares_of(0, 0, 0, 6, 6),  # the first one neither
    shares_of(0, 0, 6, 6, 6),
    [Shard(0, 3, 6), Shard(0, 0, 3), Shard(0, 0, 3)],  # not in the order of ranks, and one part twice
]


def own_part(whole: Tensor, share: Shard) -> Tensor:
    dim, first, last = share
    return whole.narrow(dim, first, last - first)


@in_one
@along(shares=DIVIDED, dtype=[torch.float32, torch.bfloat16, torch.int64])
def test_parts_are_put_together_beside_whole_tensors(shares: list[Shard], dtype: torch.dtype) -> None:
    whole, plain = torch.arange(24).reshape(6, 4).to(dtype), torch.arange(3)

    def run(transport: Transport) -> dict[str, Tensor] | None:
        share = shares[transport.rank]
        own = {"first": plain, "parts": own_part(whole, share)} if transport.rank else {"parts": own_part(whole, share)}
        return gather_state(transport, own, {"parts": share, "elsewhere": Shard(0, 0, 1)}, in_memory)

    state, *others = on_ranks(3, run)
    assert others == [None, None] and state is not None
    assert state.keys() == {"first", "parts"}
    assert torch.equal(state["parts"], whole) and state["parts"].dtype == dtype
    assert state["parts"].data_ptr() != whole.data_ptr()
    assert torch.equal(state["first"], plain)


class Divided(nn.Module):
    """A part of a weight and of a bias, and a whole one."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.scale = nn.Parameter(torch.zeros(()))


@in_one
@pytest.mark.parametrize("shares", DIVIDED)
def test_of_a_state_every_rank_takes_its_part(shares: list[Shard]) -> None:
    whole = {"weight": torch.randn(6, 4), "bias": torch.randn(6, 4), "scale": torch.tensor(3.0)}

    def run(transport: Transport) -> dict[str, Tensor]:
        share = shares[transport.rank]
        part = own_part(whole["weight"], share)
        stage = Divided(torch.zeros_like(part), torch.zeros(6, 4))
        parameters = list(stage.parameters())
        left = broadcast_state(transport, stage, whole if transport.rank == 0 else None, list(whole), {"weight": share})
        assert torch.equal(stage.weight, part) and torch.equal(stage.bias, whole["bias"])
        assert stage.scale == 3.0
        assert all(a is b and a.is_leaf for a, b in zip(parameters, stage.parameters(), strict=True))
        again = gather_state(transport, stage.state_dict(), {"weight": share}, in_memory)
        assert again is None or all(torch.equal(again[name], tensor) for name, tensor in whole.items())
        return left

    assert on_ranks(3, run) == [{}, {}, {}]


@in_one
@along(shape=[(6, 5), (5, 4), (7, 4), (6,), (), (4, 6)], dim=[0, 1, 1])
def test_a_state_of_which_a_rank_cannot_have_its_part_is_refused_on_every_rank(
    shape: tuple[int, ...], dim: int
) -> None:
    shares = shares_of(dim, 0, 2, (6, 4)[dim])
    whole = {"weight": torch.ones(shape), "bias": torch.ones(6, 4), "scale": torch.ones(())}

    def run(transport: Transport) -> str:
        share = shares[transport.rank]
        stage = Divided(own_part(torch.zeros(6, 4), share), torch.zeros(6, 4))
        with pytest.raises(LaunchError) as caught:
            broadcast_state(transport, stage, whole if transport.rank == 0 else None, list(whole), {"weight": share})
        assert not any(bool(p.any()) for p in stage.parameters())
        return str(caught.value)

    (text,) = set(on_ranks(2, run))
    problem = f"weight: needs shape (6, 4), has {shape}"
    assert text == f"the state_dict does not fit the model, and nothing was loaded:\n  - {problem}"
