"""Groups that share layers: every transition is one process's value and gradient, and sends what the table says."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from splitc.ir.transitions import nbytes_sent
from splitc.runtime.collectives.layouts import Extents, State, Transition
from splitc.runtime.collectives.model_parallel import Group
from splitc.runtime.transport.base import Transport, Work
from splitc.runtime.transport.in_flight import joined
from tests.support.ranks import on_ranks
from tests.support.sampling import in_one
from tests.support.transitions import TABLE, TRANSITIONS, Case, cases, count_sent, fractions_sent

EVERY = pytest.mark.parametrize("transition", TRANSITIONS, ids=str)


def on_group(size: int, function: Callable[[Group], Any]) -> list[Any]:
    """Call `function` on each member of a group of all ranks; the bytes it counts must be those that travelled."""

    def member(transport: Transport) -> Any:
        sent = count_sent(transport)
        group = Group(transport, range(size))
        result = function(group)
        assert abs(group.transport.sent_bytes - sum(sent)) <= len(sent), "which an all-reduce rounds"
        return result

    return on_ranks(size, member)


def own_of(whole: Tensor, sizes: Sequence[int], rank: int, dim: int) -> Tensor:
    return whole.split(list(sizes), dim)[rank]


def moved(group: Group, x: Tensor, source: State, target: State, extents: Extents) -> Tensor:
    return group.transition(x, Transition(source, target), extents)


# every row of the table


@pytest.mark.parametrize("sizes", [(2, 3), pytest.param((4, 6), marks=pytest.mark.slow)])
def test_value_and_gradient_are_those_of_one_process_by_the_adjoint_and_the_bytes_of_the_table(
    sizes: tuple[int, ...],
) -> None:
    """One process: loss = sum(value * gradient).  What a rank holds of both follows from their states.

    <A x, y> = <x, A* y>: summed over ranks, but once for a value that is alike on all, whose gradient is too.
    """
    for size, transition in product(sizes, TRANSITIONS):
        seen = on_ranks(size, partial(moved_there_and_back, transition=transition, size=size))
        for each in zip(*seen, strict=True):
            gradients, expected, products = zip(*each, strict=True)
            if transition.source is State.DIVIDED:  # whose gradients are terms of a sum
                assert_same(sum(gradients), sum(expected))
            else:
                assert_same(list(gradients), list(expected))
            lefts, rights = zip(*products, strict=True)
            left = lefts[0] if transition.target is State.REPLICATE else sum(lefts)
            right = rights[0] if transition.source is State.REPLICATE else sum(rights)
            tolerance = 1e-12 if gradients[0].dtype == torch.float64 else 1e-4
            assert left == pytest.approx(right, rel=tolerance, abs=tolerance)


def moved_there_and_back(
    transport: Transport, transition: Transition, size: int
) -> list[tuple[Tensor, Tensor, tuple[float, float]]]:
    """For each case the gradient, what it should be, and the products of the adjoint; asserts the bytes that travel."""
    source, target = transition
    sent, group, seen = count_sent(transport), Group(transport, range(size)), []
    for case in cases(size, transition):
        sent.clear()
        whole, gradient, extents, index = case.value(1), case.value(2), case.extents, group.index
        x = case.held(whole, source, index).detach().requires_grad_()
        before = group.transport.sent_bytes
        value = group.transition(x, transition, extents)
        forward = sum(sent)
        assert_same(value, case.held(whole, target, index))
        y = case.held(gradient, target.gradient, index, seed=50)
        value.backward(y)
        assert x.grad is not None and x.grad.shape == x.shape
        backward = sum(sent) - forward
        assert abs(group.transport.sent_bytes - before - sum(sent)) <= len(sent), "which an all-reduce rounds"
        _, done, undone = TABLE[transition]
        for travelled, what, move in ((forward, done, transition), (backward, undone, transition.adjoint)):
            assert travelled == pytest.approx(fractions_sent(what, extents, index) * whole.nbytes), what
            assert travelled == pytest.approx(nbytes_sent(move, whole.nbytes, extents, index)), what
        products = float((value.detach() * y).sum()), float((x.detach() * x.grad).sum())
        seen.append((x.grad, case.held(gradient, source.gradient, index), products))
    return seen


def assert_same(got: Any, expected: Any) -> None:
    first = got[0] if isinstance(got, list) else got
    tolerance = 1e-9 if first.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


# what one process computes


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return Case(shape, Extents(), dtype).value(seed)


def test_other_dtypes_travel_as_they_are() -> None:
    extents = Extents((3, 1), (2, 1))
    case = Case((4, 3), extents)

    def member(group: Group) -> None:
        for (source, target), dtype in product(TABLE, (torch.bfloat16, torch.float16, torch.complex64)):
            whole = torch.arange(12).reshape(4, 3).to(dtype)
            terms = [whole * 2, -whole] if source is State.PARTIAL else None
            x = (terms[group.index] if terms else case.held(whole, source, group.index)).clone().requires_grad_()
            value = moved(group, x, source, target, extents)
            assert torch.equal(value, case.held(whole, target, group.index)) and value.requires_grad
            (gradient,) = torch.autograd.grad(value, x, torch.ones_like(value))
            assert gradient.dtype == dtype and gradient.shape == x.shape

    on_group(2, member)


# the rest


def test_a_group_of_one_rank_passes_everything_through_and_sends_nothing() -> None:
    def alone(transport: Transport) -> None:
        group, x = Group(transport, (transport.rank,)), random(1, 3, 4).requires_grad_()
        for transition in TRANSITIONS:
            assert group.transition(x, transition, Extents((3,), (4,))) is x
            assert torch.equal(group.start(x, transition, Extents((3,), (4,))).wait(), x)
        assert torch.equal(group.all_reduce_scalar(x), x) and not group.all_reduce_scalar(x).requires_grad
        assert (group.size, group.index, group.transport.sent_bytes) == (1, 0, 0)

    on_ranks(2, alone)


@in_one
@EVERY
def test_a_transition_that_is_started_early_is_the_same_without_a_graph(transition: Transition) -> None:
    """Two are under way at once, and what they bring is waited for in the other order."""
    source, target = transition

    def member(group: Group) -> None:
        case = cases(3, transition)[1]
        wholes = [case.value(1), case.value(2)]
        held = [case.held(whole, source, group.index).requires_grad_() for whole in wholes]
        moving = [group.start(x, transition, case.extents) for x in held]
        for whole, each in reversed(list(zip(wholes, moving, strict=True))):
            value = each.wait()
            assert_same(value, case.held(whole, target, group.index))
            assert not value.requires_grad

    on_group(3, member)


def test_groups_of_some_ranks_leave_the_others_alone() -> None:
    def action(transport: Transport) -> Tensor:
        group = Group(transport, (0, 2) if transport.rank % 2 == 0 else (1, 3))
        transport.connect([group.ranks])
        assert group.index == transport.rank // 2
        return moved(group, torch.tensor([transport.rank]), State.BATCH, State.REPLICATE, Extents((1, 1)))

    assert [gathered.tolist() for gathered in on_ranks(4, action)] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_what_is_gathered_arrives_in_one_buffer_and_along_the_first_dim_is_not_copied_again() -> None:
    def action(transport: Transport) -> list[int]:
        given, gather = list[Tensor](), transport._all_gather

        def watched(outputs: list[Tensor], tensor: Tensor, ranks: tuple[int, ...]) -> Work:
            given.extend(outputs)
            return gather(outputs, tensor, ranks)

        transport._all_gather = watched  # type: ignore[method-assign]
        group, sizes, found = Group(transport, range(3)), (2, 0, 3), list[int]()
        for source, shape in ((State.BATCH, (sizes[group.index], 4)), (State.FEATURES, (4, sizes[group.index]))):
            whole = moved(group, random(1, *shape), source, State.REPLICATE, Extents(sizes, sizes))
            assert joined(given) is not None
            found.append(len({each.untyped_storage().data_ptr() for each in (*given, whole)}))
            given.clear()
        return found

    assert on_ranks(3, action) == [[1, 2]] * 3


def test_a_second_derivative_is_refused() -> None:
    def member(group: Group) -> None:
        for transition in TRANSITIONS:
            case = cases(2, transition)[0]
            x = case.held(case.value(1), transition.source, group.index).detach().requires_grad_()
            value = group.transition(x, transition, case.extents)
            (grad,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                grad.sum().backward()

    on_group(2, member)


def test_sizes_that_do_not_fit_are_refused() -> None:
    def member(group: Group) -> None:
        x = random(1, 3, 2)
        with pytest.raises(ValueError, match=r"features -> divided with sizes \[2\] in a group of 2 ranks"):
            moved(group, x, State.FEATURES, State.DIVIDED, Extents((), (2,)))
        with pytest.raises(ValueError, match=r"\(3, 2\) float64 .* by sizes \[4, 4\] dim 0 should be 4"):
            moved(group, x, State.BATCH, State.REPLICATE, Extents((4, 4)))
        with pytest.raises(ValueError, match=r"replicate -> batch .* should be 8"):
            moved(group, x, State.REPLICATE, State.BATCH, Extents((4, 4)))
        with pytest.raises(ValueError, match=r"batch -> features .*by sizes \[4, 1\] dim -1 should be 5"):
            moved(group, x, State.BATCH, State.FEATURES, Extents((3, 3), (4, 1)))

    on_group(2, member)
