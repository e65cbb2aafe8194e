"""A whole state across ranks: gathered, spread and handed out, tensor by tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitc.errors import LaunchError
from splitc.runtime.checkpoint import gather_state, hand_out, spread_state
from splitc.runtime.transport import Transport
from tests.ranks import on_ranks

DTYPES = {"a": torch.float64, "b": torch.bfloat16, "c": torch.int64, "d": torch.bool}


def test_gathered_tensors_keep_their_dtypes_and_are_copies_on_rank_0() -> None:
    given = {name: torch.tensor([[0, 1], [1, 0]]).to(dtype) for name, dtype in DTYPES.items()}

    def run(transport: Transport) -> dict[str, Tensor] | None:
        own = {name: given[name] for k, name in enumerate(given) if k % 3 == transport.rank}
        return gather_state(transport, own)

    whole, *others = on_ranks(3, run)
    assert others == [None, None]
    assert whole is not None
    assert whole.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(whole[name], tensor)
        assert whole[name].data_ptr() != tensor.data_ptr()


def test_scalars_empty_tensors_and_parts_of_tensors_are_gathered_too() -> None:
    given = {"count": torch.tensor(3), "none": torch.zeros(0, 4), "column": torch.arange(6.0).reshape(2, 3)[:, 1]}
    whole, _ = on_ranks(2, lambda t: gather_state(t, given if t.rank else {}))
    assert whole is not None
    for name, tensor in given.items():
        assert whole[name].shape == tensor.shape
        assert torch.equal(whole[name], tensor)


def test_where_two_ranks_give_a_name_the_lower_rank_counts() -> None:
    whole, *_ = on_ranks(3, lambda t: gather_state(t, {"x": torch.tensor(t.rank)} if t.rank else {}))
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
        left = spread_state(transport, stage, whole if transport.rank == 0 else None, list(whole))
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
        spread_state(transport, stage, whole, list(whole))
        for name, tensor in stage.state_dict().items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, whole[name].float())

    on_ranks(3, run)


def test_only_rank_0s_state_counts() -> None:
    whole = state()

    def run(transport: Transport) -> None:
        stage = stage_of(transport.rank)
        own = whole if transport.rank == 0 else {key: torch.zeros_like(t) for key, t in whole.items()}
        spread_state(transport, stage, own, list(whole))
        assert all(torch.equal(tensor, whole[name]) for name, tensor in stage.state_dict().items())
        assert transport.rank == 0 or not any(bool(tensor.any()) for tensor in own.values())  # and is left alone

    on_ranks(3, run)


def broken(**changes: Any) -> dict[str, Tensor]:
    changed = {**state(), **{key.replace("_", "."): value for key, value in changes.items()}}
    return {key: tensor for key, tensor in changed.items() if tensor is not None}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (broken(second_weight=torch.zeros(7)), "second.weight: needs shape (3, 2), has (7,)"),
        (broken(second_weight=None), "second.weight: missing"),
        (broken(third_weight=None), "third.weight: missing"),
        (broken(fourth_weight=torch.zeros(1)), "fourth.weight: the model has no such key"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(
    given: dict[str, Tensor], problem: str
) -> None:
    def run(transport: Transport) -> str:
        stage = stage_of(transport.rank)
        before = {name: tensor.clone() for name, tensor in stage.state_dict().items()}
        with pytest.raises(LaunchError) as caught:
            spread_state(transport, stage, given if transport.rank == 0 else None, list(state()))
        assert all(torch.equal(tensor, before[name]) for name, tensor in stage.state_dict().items())
        return str(caught.value)

    (text,) = set(on_ranks(3, run))
    assert text == f"the state_dict does not fit the model, and nothing was loaded:\n  - {problem}"


def test_rank_0_must_give_the_state() -> None:
    def run(transport: Transport) -> None:
        with pytest.raises(LaunchError, match="rank 0 must give the state"):
            spread_state(transport, stage_of(transport.rank), state() if transport.rank else None, [])

    on_ranks(2, run)


def test_every_rank_is_handed_its_own_part() -> None:
    parts = [{"x": torch.tensor([rank]), "y": torch.ones(rank, dtype=torch.bfloat16)} for rank in range(3)]
    for rank, part in enumerate(on_ranks(3, lambda t: hand_out(t, parts if t.rank == 0 else None))):
        assert part.keys() == parts[rank].keys()
        assert all(torch.equal(part[name], parts[rank][name]) for name in part)
