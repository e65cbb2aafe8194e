"""Groups that share layers: one process's values and gradients, adjoints, and the bytes that travel."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from splitc.runtime.collectives.model_parallel import Group
from splitc.runtime.transport.base import Transport
from tests.support.ranks import on_ranks

SIZES = [(2, 2), (3, 0, 1), (1, 4, 2, 2)]


def count_sent(transport: Transport) -> list[int]:
    """The payload of every operation that `transport` starts from now on; a sum counts as on a ring."""
    sent: list[int] = []
    counts: dict[str, Callable[..., int]] = {
        "_isend": lambda tensor, dst, tag: tensor.nbytes,
        "_all_reduce": lambda tensor, ranks: 2 * (len(ranks) - 1) * tensor.nbytes // len(ranks),
        "_all_gather": lambda outputs, tensor, ranks: (len(ranks) - 1) * tensor.nbytes,
        "_reduce_scatter": lambda output, pieces, ranks: sum(
            piece.nbytes for piece, rank in zip(pieces, ranks, strict=True) if rank != transport.rank
        ),
    }
    for name, count in counts.items():
        start = getattr(transport, name)

        def counted(*arguments: Any, start: Any = start, count: Callable[..., int] = count) -> Any:
            sent.append(count(*arguments))
            return start(*arguments)

        setattr(transport, name, counted)
    return sent


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def own_of(whole: Tensor, sizes: Sequence[int], rank: int, dim: int) -> Tensor:
    return whole.split(list(sizes), dim)[rank]


def on_group(size: int, function: Callable[[Group], Any]) -> list[Any]:
    """Call `function` on each member of a group of all ranks; the bytes it counts must be those that travelled."""

    def member(transport: Transport) -> Any:
        sent = count_sent(transport)
        group = Group(transport, range(size))
        result = function(group)
        assert group.sent_bytes == sum(sent)
        return result

    return on_ranks(size, member)


def dot(a: Tensor, b: Tensor) -> float:
    return float((a.detach() * b.detach()).sum())


# what one process computes


def mlp() -> tuple[Tensor, ...]:
    """Examples, targets, and the weights of two linear layers, to be differentiated."""
    x, first, second, bias = random(1, 6, 5), random(2, 8, 5), random(3, 4, 8), random(4, 4)
    return x, torch.arange(6) % 4, first.requires_grad_(), second.requires_grad_(), bias.requires_grad_()


def test_a_column_split_then_a_row_split_layer_are_one_process() -> None:
    x, target, first, second, bias = mlp()
    x.requires_grad_()
    loss = F.cross_entropy(F.linear(F.relu(F.linear(x, first)), second, bias), target)
    expected = torch.autograd.grad(loss, [x, first, second])
    widths = (3, 4, 1)

    def member(group: Group) -> None:
        inputs = x.detach().clone().requires_grad_()
        up = own_of(first.detach(), widths, group.index, 0).clone().requires_grad_()
        down = own_of(second.detach(), widths, group.index, 1).clone().requires_grad_()
        hidden = F.relu(F.linear(group.copy_to_group(inputs), up))
        ours = F.cross_entropy(group.reduce_from_group(F.linear(hidden, down)) + bias.detach(), target)
        torch.testing.assert_close(ours, loss, rtol=1e-12, atol=1e-12)
        gotten = torch.autograd.grad(ours, [inputs, up, down])
        wholes = [expected[0], own_of(expected[1], widths, group.index, 0), own_of(expected[2], widths, group.index, 1)]
        torch.testing.assert_close(list(gotten), wholes, rtol=1e-12, atol=1e-12)
        assert group.sent_bytes == 2 * 2 * (8 * 6 * 4) // 3 + 2 * 2 * (8 * 6 * 5) // 3  # scores, input gradient

    on_group(3, member)


def test_modulo_and_shard_layers_are_one_process() -> None:
    """Krizhevsky's scheme: each member brings examples, and two layers whose features are divided work on all."""
    x, target, first, second, bias = mlp()
    x.requires_grad_()
    loss = F.cross_entropy(F.linear(F.relu(F.linear(x, first)), second, bias), target)
    expected = torch.autograd.grad(loss, [x, first, second, bias])
    rows, hidden_widths, widths = (1, 3, 2), (2, 5, 1), (2, 0, 2)

    def member(group: Group) -> None:
        i = group.index
        up = own_of(first.detach(), hidden_widths, i, 0).clone().requires_grad_()
        down = own_of(second.detach(), widths, i, 0).clone().requires_grad_()
        shift = own_of(bias.detach(), widths, i, 0).clone().requires_grad_()
        examples = group.gather_examples(own_of(x, rows, i, 0), rows).requires_grad_()
        targets = group.gather_examples(own_of(target, rows, i, 0), rows)
        assert torch.equal(targets, target)
        hidden = group.gather_features(F.relu(F.linear(examples, up)), hidden_widths, partial=True)
        scores = group.gather_features(F.linear(hidden, down, shift), widths, partial=False)
        ours = F.cross_entropy(scores, targets)
        torch.testing.assert_close(ours, loss, rtol=1e-12, atol=1e-12)
        ours.backward()
        assert examples.grad is not None
        gotten = [group.scatter_gradients(examples.grad, rows, partial=True), up.grad, down.grad, shift.grad]
        cut = [(rows, 0), (hidden_widths, 0), (widths, 0), (widths, 0)]
        wholes = [own_of(whole, sizes, i, dim) for whole, (sizes, dim) in zip(expected, cut, strict=True)]
        torch.testing.assert_close(gotten, wholes, rtol=1e-12, atol=1e-12)

    on_group(3, member)


@pytest.mark.parametrize("widths", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_features_are_gathered_and_their_gradients_summed_or_cut(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    size, whole = len(widths), random(1, 2, 3, sum(widths), dtype=dtype)
    grads = [random(rank + 2, 2, 3, sum(widths), dtype=dtype) for rank in range(size)]
    total = sum(grads[1:], start=grads[0].clone())

    def member(group: Group) -> None:
        for partial, gradient in [(True, total), (False, grads[group.index])]:
            x = own_of(whole, widths, group.index, -1).detach().requires_grad_()  # not contiguous
            gathered = group.gather_features(x, widths, partial)
            assert torch.equal(gathered, whole)
            gathered.backward(grads[group.index])
            assert x.grad is not None
            assert torch.equal(x.grad, own_of(gradient, widths, group.index, -1))

    on_group(size, member)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("rows", SIZES)
def test_examples_are_gathered_along_any_dim_and_returned(rows: tuple[int, ...], dim: int) -> None:
    shape = [3, 2, 2]
    shape[dim] = sum(rows)
    whole = random(1, *shape)

    def member(group: Group) -> None:
        own = own_of(whole, rows, group.index, dim)
        assert torch.equal(group.gather_examples(own, rows, dim), whole)
        assert torch.equal(group.slice_examples(whole, rows, dim), own)
        assert torch.equal(group.gather_gradients(own, rows, dim), whole)
        summed = group.scatter_gradients(whole * (group.index + 1), rows, dim, partial=True)
        torch.testing.assert_close(summed, own * (group.size * (group.size + 1) / 2))
        assert torch.equal(group.scatter_gradients(whole, rows, dim, partial=False), own)

    on_group(len(rows), member)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8, torch.bool, torch.bfloat16])
def test_examples_of_any_dtype_are_gathered_without_a_graph(dtype: torch.dtype) -> None:
    whole = torch.tensor([[1, 0], [0, 1], [1, 1]]).to(dtype)

    def member(group: Group) -> None:
        own = own_of(whole, (1, 2), group.index, 0).clone()
        gathered = group.gather_examples(own.requires_grad_(dtype.is_floating_point), (1, 2))
        assert torch.equal(gathered, whole)
        assert not gathered.requires_grad

    on_group(2, member)


# adjoints: <A x, y> = <x, A^T y>, summed over the members where a value differs between them


@pytest.mark.parametrize("sizes", SIZES)
def test_the_backward_of_every_operation_is_its_adjoint(sizes: tuple[int, ...]) -> None:
    n = len(sizes)
    alike = random(0, 3, sum(sizes))  # the same on all members
    different = [random(10 + rank, 3, sum(sizes)) for rank in range(n)]

    def both(x: Tensor, operation: Callable[[Tensor], Tensor], y: Tensor) -> tuple[float, float]:
        x = x.clone().requires_grad_()
        value = operation(x)
        value.backward(y)
        assert x.grad is not None
        return dot(value, y), dot(x, x.grad)

    def member(group: Group) -> dict[str, tuple[float, float]]:
        y = different[group.index]
        part = own_of(random(7, 3, sum(sizes)), sizes, group.index, -1)
        gathered = group.gather_examples(part, sizes, 1)
        spread = group.gather_gradients(part, sizes, 1)
        return {
            "gather, each goes on": both(part, lambda x: group.gather_features(x, sizes, partial=True), y),
            "gather, alike": both(part, lambda x: group.gather_features(x, sizes, partial=False), alike),
            "enter": both(alike, group.copy_to_group, y),
            "sum": both(y, group.reduce_from_group, alike),
            "examples": (dot(gathered, y), dot(part, group.scatter_gradients(y, sizes, 1, partial=True))),
            "own": (dot(group.slice_examples(alike, sizes, 1), part), dot(alike, spread)),
        }

    seen = on_group(n, member)
    left = {name: sum(result[name][0] for result in seen) for name in seen[0]}
    right = {name: sum(result[name][1] for result in seen) for name in seen[0]}
    once = seen[0]  # a value that is alike on all members counts once
    left["gather, alike"], left["sum"] = once["gather, alike"][0], once["sum"][0]
    right["enter"], right["own"] = once["enter"][1], once["own"][1]
    for name in left:
        assert left[name] == pytest.approx(right[name], rel=1e-12, abs=1e-12), name


# the rest


def test_a_group_of_one_rank_passes_everything_through_and_sends_nothing() -> None:
    def alone(transport: Transport) -> None:
        group = Group(transport, (transport.rank,))
        x = random(1, 3, 4).requires_grad_()
        for same in [group.copy_to_group(x), group.reduce_from_group(x), group.gather_features(x, [4], partial=True)]:
            assert same is x
        for same in [
            group.gather_examples(x, [3]), group.scatter_gradients(x, [3], partial=True), group.slice_examples(x, [3]),
            group.gather_gradients(x, [3]), group.all_reduce_scalar(x),
        ]:  # fmt: skip
            assert torch.equal(same, x)
            assert not same.requires_grad
        assert (group.size, group.index, group.sent_bytes) == (1, 0, 0)

    on_ranks(2, alone)


def test_groups_of_some_ranks_leave_the_others_alone() -> None:
    def action(transport: Transport) -> Tensor:
        group = Group(transport, (0, 2) if transport.rank % 2 == 0 else (1, 3))
        assert group.index == transport.rank // 2
        return group.gather_examples(torch.tensor([transport.rank]), [1, 1])

    assert [gathered.tolist() for gathered in on_ranks(4, action)] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_a_second_derivative_is_refused() -> None:
    def member(group: Group) -> None:
        for operation in (
            group.copy_to_group,
            group.reduce_from_group,
            lambda x: group.gather_features(x, [2, 2], partial=True),
        ):
            x = random(1, 3, 2).requires_grad_()
            (grad,) = torch.autograd.grad(operation(x).square().sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                grad.sum().backward()

    on_group(2, member)


def test_sizes_that_do_not_fit_are_refused() -> None:
    def member(group: Group) -> None:
        x = random(1, 3, 2)
        with pytest.raises(ValueError, match=r"gather_features with sizes \[2\] in a group of 2 ranks"):
            group.gather_features(x, [2], partial=True)
        with pytest.raises(ValueError, match=r"\(3, 2\) float64 .* by sizes \[4, 4\] dim 0 should be 4"):
            group.gather_examples(x, [4, 4])
        with pytest.raises(ValueError, match=r"scatter_gradients .* should be 8"):
            group.scatter_gradients(x, [4, 4], partial=False)

    on_group(2, member)


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 0 is not one of the group's ranks \(1, 2\)"):
        on_ranks(1, lambda transport: Group(transport, (1, 2)))
