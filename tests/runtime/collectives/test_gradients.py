"""Gradients summed over replicas, bucket by bucket: what the sums are, and when they start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from splitc.runtime.collectives.gradients import GradientSum, all_reduce_tied
from splitc.runtime.transport.base import Transport, Work
from tests.support.ranks import on_ranks
from tests.support.sampling import in_one

T = TypeVar("T")
BUCKETS = (("last.weight", "last.bias"), ("first.weight", "first.bias"))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)
        self.aside = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).square().sum()


def stage_like(model: nn.Module) -> nn.Module:
    stage = type(model)()
    stage.load_state_dict(model.state_dict())
    return stage


def inputs_of(rank: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))


def gradients(stage: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}


def gradients_of(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """Of one process with the examples of one rank."""
    alone = stage_like(model)
    alone(inputs_of(rank)).backward()
    return gradients(alone)


def expected(model: nn.Module, world: int) -> dict[str, Tensor]:
    """Of one process with the examples of all ranks."""
    alone = stage_like(model)
    alone(torch.cat([inputs_of(rank) for rank in range(world)])).backward()
    return gradients(alone)


def on_replicas(model: nn.Module, function: Callable[[Transport, nn.Module, Tensor], T], world: int = 3) -> list[T]:
    return on_ranks(world, lambda t: function(t, stage_like(model), inputs_of(t.rank)))


def everyone(transport: Transport, buckets: Sequence[Sequence[str]] = BUCKETS) -> list[tuple[int, ...]]:
    """All ranks, for each bucket."""
    return [tuple(range(transport.world))] * len(buckets)


@in_one
@pytest.mark.parametrize(
    "buckets", [BUCKETS, BUCKETS[::-1], (BUCKETS[0] + BUCKETS[1],), tuple((n,) for b in BUCKETS for n in b)]
)
def test_on_leaving_every_gradient_is_the_sum_over_the_replicas(buckets: tuple[tuple[str, ...], ...]) -> None:
    model = Stage()

    def run(transport: Transport, stage: nn.Module, x: Tensor) -> dict[str, Tensor]:
        summing = GradientSum(stage, buckets)
        for _ in range(2):  # a second step starts anew
            stage.zero_grad()
            with summing.while_backward(transport, everyone(transport, buckets)):
                stage(x).backward()
        return gradients(stage)

    for got in on_replicas(model, run):
        torch.testing.assert_close(got, expected(model, 3))


class Log:
    """The order in which a rank starts sums and gets gradients."""

    def __init__(self, transport: Transport, stage: nn.Module) -> None:
        self.events: list[str] = []
        start = transport._all_reduce

        def logged(tensor: Tensor, ranks: tuple[int, ...], maximum: bool = False) -> Work:
            self.events.append(f"sum of {tensor.numel()}")
            return start(tensor, ranks, maximum)

        transport._all_reduce = logged  # type: ignore[method-assign]
        for name, parameter in stage.named_parameters():
            parameter.register_hook(lambda _, name=name: self.events.append(name))


def test_each_bucket_is_summed_over_ranks_of_its_own() -> None:
    """Those of parameters that every rank of a group uses on its own examples have more ranks than the others."""
    model = Stage()

    def run(transport: Transport, stage: nn.Module, x: Tensor) -> dict[str, Tensor]:
        ranks = [tuple(range(4)), (transport.rank % 2, transport.rank % 2 + 2)]
        transport.connect(ranks)
        with GradientSum(stage, BUCKETS).while_backward(transport, ranks):
            stage(x).backward()
        return gradients(stage)

    alone = [gradients_of(model, rank) for rank in range(4)]
    for rank, got in enumerate(on_replicas(model, run, world=4)):
        for name, gradient in got.items():
            summed = range(4) if name.startswith("last") else (rank % 2, rank % 2 + 2)
            torch.testing.assert_close(gradient, sum(alone[other][name] for other in summed))


def test_a_bucket_starts_before_backward_has_reached_the_layers_below_it() -> None:
    def run(transport: Transport, stage: nn.Module, x: Tensor) -> list[str]:
        log = Log(transport, stage)
        with GradientSum(stage, BUCKETS).while_backward(transport, everyone(transport)):
            stage(x).backward()
        return log.events

    for events in on_replicas(Stage(), run):
        assert set(events[:2]) == {"last.weight", "last.bias"}
        assert events[2] == "sum of 10"
        assert set(events[3:5]) == {"first.weight", "first.bias"}
        assert events[5:] == ["sum of 16"]


def test_buckets_start_in_their_order_even_when_a_later_one_fills_first() -> None:
    def run(transport: Transport, stage: nn.Module, x: Tensor) -> list[str]:
        log = Log(transport, stage)
        with GradientSum(stage, BUCKETS[::-1]).while_backward(transport, everyone(transport)):
            stage(x).backward()
        return [event for event in log.events if event.startswith("sum")]

    assert on_replicas(Stage(), run) == [["sum of 16", "sum of 10"]] * 3


def test_a_parameter_that_the_loss_does_not_reach_keeps_no_gradient_and_holds_nobody_up() -> None:
    model = Stage()

    def run(transport: Transport, stage: nn.Module, x: Tensor) -> dict[str, Tensor]:
        buckets = (("aside.weight", "last.bias", "last.weight", "aside.bias"), ("first.weight", "first.bias"))
        with GradientSum(stage, buckets).while_backward(transport, everyone(transport)):
            stage(x).backward()
        return gradients(stage)

    for got in on_replicas(model, run):
        torch.testing.assert_close(got, expected(model, 3))  # which has no aside either


def test_a_parameter_that_one_rank_alone_reaches_has_the_gradient_of_that_rank() -> None:
    buckets = (("aside.weight", "aside.bias"),)

    def run(transport: Transport, stage: nn.Module, x: Tensor) -> dict[str, Tensor]:
        with GradientSum(stage, buckets).while_backward(transport, everyone(transport, buckets)):
            alone = stage.get_submodule("aside")(x).sum() if transport.rank == 0 else 0.0
            (stage(x) + alone).backward()
        return gradients(stage)

    torch.testing.assert_close(on_replicas(Stage(), run)[0]["aside.bias"], torch.full((2,), 5.0))


class Tied(nn.Module):
    """One weight under two names, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().sum()


@in_one
@pytest.mark.parametrize("name", ["first.weight", "second.weight"])
def test_a_parameter_used_twice_is_summed_once_whole_under_either_name(name: str) -> None:
    model = Tied()

    def run(transport: Transport, stage: nn.Module, x: Tensor) -> dict[str, Tensor]:
        with GradientSum(stage, ((name,),)).while_backward(transport, everyone(transport, ((name,),))):
            stage(x).backward()
        return gradients(stage)

    for got in on_replicas(model, run):
        torch.testing.assert_close(got, expected(model, 3))


def test_the_gradient_of_a_tied_parameter_is_summed_however_it_lies_in_memory() -> None:
    lies = torch.arange(9.0).reshape(3, 3)

    def run(transport: Transport, stage: nn.Module, x: Tensor) -> None:
        for own in (lies, lies.t()):
            weight = stage.get_parameter("first.weight")
            weight.grad = own.clone(memory_format=torch.preserve_format)
            all_reduce_tied(transport, stage, {"first.weight": (0, 1)})
            assert weight.grad is not None and torch.equal(weight.grad, 2 * own)

    on_replicas(Tied(), run, world=2)


def test_a_second_backward_is_an_error_and_no_wrong_gradient() -> None:
    def run(transport: Transport, stage: nn.Module, x: Tensor) -> None:
        with GradientSum(stage, BUCKETS).while_backward(transport, everyone(transport)):
            stage(x).backward()
            stage(x).backward()

    with pytest.raises(RuntimeError, match="gradient of bucket 0 changed after its sum had started"):
        on_replicas(Stage(), run)


def test_an_error_inside_backward_passes_through_and_ends_the_summing() -> None:
    def run(transport: Transport, stage: nn.Module, x: Tensor) -> list[str]:
        log = Log(transport, stage)
        summing = GradientSum(stage, BUCKETS)
        with pytest.raises(KeyError, match="mine"), summing.while_backward(transport, everyone(transport)):
            raise KeyError("mine")
        stage(x).backward()
        return [event for event in log.events if event.startswith("sum")]

    assert on_replicas(Stage(), run) == [[], [], []]


def test_gradients_are_parts_of_their_buckets_sum_so_that_no_second_copy_of_them_is_kept() -> None:
    def run(transport: Transport, stage: nn.Module, x: Tensor) -> int:
        with GradientSum(stage, BUCKETS).while_backward(transport, everyone(transport)):
            stage(x).backward()
        kept = {p.grad.untyped_storage().data_ptr() for p in stage.parameters() if p.grad is not None}
        return len(kept)

    assert on_replicas(Stage(), run) == [2, 2, 2]
