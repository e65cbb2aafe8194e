"""Late multiply: the gradients of one process, gathered while backward still runs."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from splitc.runtime.late_multiply.layers import LateMultiply
from splitc.runtime.transport.base import Transport, Work
from tests.runtime.collectives.test_model_parallel import own_of, random
from tests.support.ranks import on_ranks
from tests.support.sampling import along, in_one
from tests.support.transitions import count_sent

ROWS = [(2, 2), (1, 3, 2), (3, 0, 1)]


def on_replicas(size: int, function: Callable[[LateMultiply, int], Any]) -> list[Any]:
    """Call `function` with the late multiply of every replica and its index; the bytes counted must have travelled."""

    def replica(transport: Transport) -> Any:
        sent = count_sent(transport)
        late = LateMultiply(transport, range(size))
        result = function(late, transport.rank)
        assert late.transport.sent_bytes == sum(sent)
        return result

    return on_ranks(size, replica)


def assert_replicas(gotten: Sequence[Sequence[Tensor | None]], expected: Sequence[Tensor | None]) -> None:
    """Every replica has the expected gradients to 1e-12, and the same bits as the others."""
    for one, other in pairwise(gotten):
        for a, b in zip(one, other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or torch.equal(a, b)
    for ours, theirs in zip(gotten[0], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@in_one
@along(rows=ROWS, with_bias=[True, False])
def test_two_layers_have_the_gradients_of_one_process(rows: tuple[int, ...], with_bias: bool) -> None:
    x, weights = random(1, sum(rows), 5), [random(2, 4, 5), random(3, 3, 4)]
    biases = [random(4, 4), random(5, 3)] if with_bias else [None, None]

    def run(linear: Callable[..., Tensor], inputs: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        w = [weight.clone().requires_grad_() for weight in weights]
        b = [None if bias is None else bias.clone().requires_grad_() for bias in biases]
        hidden = linear(inputs, w[0], b[0]).relu_()  # in place, as nn.ReLU(inplace=True) would
        y = linear(hidden, w[1], b[1])
        y.square().sum().backward()
        return y, w, b

    y, w, b = run(F.linear, x)
    expected = [p.grad for p in (*w, *b) if p is not None]

    def replica(late: LateMultiply, index: int) -> list[Tensor | None]:
        own, w, b = run(lambda *args: late.linear(*args, rows=rows), own_of(x, rows, index, 0))
        torch.testing.assert_close(own, own_of(y, rows, index, 0), rtol=1e-12, atol=1e-12)
        parameters = [p for p in (*w, *b) if p is not None]
        assert all(p.grad is None for p in parameters)
        late.finish()
        late.finish()  # nothing is left
        assert late.transport.sent_bytes == (len(rows) - 1) * rows[index] * 8 * (5 + 4 + 4 + 3)
        return [p.grad for p in parameters]

    assert_replicas(on_replicas(len(rows), replica), expected)


def test_several_uses_of_one_weight_and_several_steps_add_up() -> None:
    weight, xs = random(1, 3, 3), [random(2, 4, 3), random(3, 2, 3)]

    def run(linear: Callable[..., Tensor], w: Tensor, parts: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> None:
        hidden = linear(parts[0], w, rows=rows[0])
        (linear(hidden, w, rows=rows[0]).sum() + linear(parts[1], w, rows=rows[1]).square().sum()).backward()

    whole = weight.clone().requires_grad_()
    for _ in range(2):
        run(lambda x, w, rows: F.linear(x, w), whole, xs, [[4], [2]])

    def replica(late: LateMultiply, index: int) -> list[Tensor | None]:
        w = weight.clone().requires_grad_()
        rows = [[1, 3], [1, 1]]
        for _ in range(2):
            run(late.linear, w, [own_of(x, r, index, 0) for x, r in zip(xs, rows, strict=True)], rows)
            late.finish()
        return [w.grad]

    assert_replicas(on_replicas(2, replica), [whole.grad])


@in_one
@pytest.mark.parametrize(("weight_trains", "bias_trains"), [(True, False), (False, True), (False, False)])
def test_only_what_trains_is_gathered(weight_trains: bool, bias_trains: bool) -> None:
    x = random(1, 4, 3)
    weight, bias = random(2, 2, 3).requires_grad_(weight_trains), random(3, 2).requires_grad_(bias_trains)
    inputs = x.clone().requires_grad_()
    w, b = weight.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    F.linear(inputs, w, b).square().sum().backward()
    expected = [w.grad if weight_trains else None, b.grad if bias_trains else None]

    def replica(late: LateMultiply, index: int) -> list[Tensor | None]:
        w, b = weight.detach().clone(), bias.detach().clone()
        w.requires_grad_(weight_trains)
        b.requires_grad_(bias_trains)
        own = x.split(2)[index].clone().requires_grad_()
        late.linear(own, w, b, rows=[2, 2]).square().sum().backward()
        late.finish()
        assert inputs.grad is not None
        torch.testing.assert_close(own.grad, inputs.grad.split(2)[index], rtol=1e-12, atol=1e-12)
        x_features, e_features = 3 if weight_trains else 0, 2 if weight_trains or bias_trains else 0
        assert late.transport.sent_bytes == 8 * 2 * (x_features + e_features)
        return [w.grad, b.grad]

    assert_replicas(on_replicas(2, replica), expected)


def test_all_factors_travel_in_one_gather_from_the_last_error_on_until_finish() -> None:
    """What makes it worth while: X and E are on their way while the layers below go backward."""

    def replica(late: LateMultiply, index: int) -> None:
        events: list[str] = []
        note_gathers(late, events)
        x, parameters = random(1, 2, 3).requires_grad_(), [random(k, 3, 3).requires_grad_() for k in (2, 3)]
        below = x * 2
        below.register_hook(lambda grad: events.append("layers below"))
        hidden = late.linear(below, parameters[0], rows=[2, 2])
        hidden.register_hook(lambda grad: events.append("last error"))
        late.linear(hidden, parameters[1], rows=[2, 2]).sum().backward()
        events.append("multiply")
        late.finish()
        assert events == ["last error", "start", "layers below", "multiply", "wait"]

    on_replicas(2, replica)


def test_a_use_that_backward_does_not_reach_holds_up_no_gradient() -> None:
    x, weight, bias = random(1, 4, 3), random(2, 2, 3), random(3, 2)
    w = weight.clone().requires_grad_()
    F.linear(x, w, bias).square().sum().backward()

    def replica(late: LateMultiply, index: int) -> list[Tensor | None]:
        w = weight.clone().requires_grad_()
        unused, events = weight.clone().requires_grad_(), list[str]()
        note_gathers(late, events)
        for _ in range(2):  # nothing is left over for the next step
            w.grad = None
            events.clear()
            late.linear(x.split(2)[index], unused, rows=[2, 2])
            late.linear(x.split(2)[index], w, bias, rows=[2, 2]).square().sum().backward()
            assert not events
            late.finish()
            assert events == ["start", "wait"] and unused.grad is None
        return [w.grad]

    assert_replicas(on_replicas(2, replica), [w.grad])


@in_one
@pytest.mark.parametrize("alternating", [True, False])
def test_the_factors_of_all_microbatches_travel_together(alternating: bool) -> None:
    x, weight = random(1, 6, 3), random(2, 2, 3)
    w = weight.clone().requires_grad_()
    F.linear(x, w).square().sum().backward()

    def replica(late: LateMultiply, index: int) -> list[Tensor | None]:
        w, events = weight.clone().requires_grad_(), list[str]()
        note_gathers(late, events)
        pieces = enumerate(own_of(x, (2, 4), index, 0).chunk(2))
        losses = (late.linear(p, w, rows=[1, 2], is_last=k == 1).square().sum() for k, p in pieces)
        for loss in losses if alternating else list(losses):
            assert not events
            loss.backward()
        assert events == ["start"]
        late.finish()
        return [w.grad]

    assert_replicas(on_replicas(2, replica), [w.grad])


def note_gathers(late: LateMultiply, events: list[str]) -> None:
    """Let every gather add "start" and "wait" to `events`."""
    start = late.transport._all_gather

    def noted(*arguments: Any) -> Work:
        events.append("start")
        work = start(*arguments)

        class Noted:
            def wait(self) -> None:
                events.append("wait")
                work.wait()

        return Noted()

    late.transport._all_gather = noted  # type: ignore[method-assign,assignment]


def test_an_input_that_changed_in_place_after_its_use_is_noticed() -> None:
    def replica(late: LateMultiply, index: int) -> None:
        x, w = random(1, 2, 3), random(2, 4, 3).requires_grad_()
        y = late.linear(x, w, rows=[2, 2])
        x.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    on_replicas(2, replica)


@in_one
@along(rows=ROWS, mode=["", "mean", "sum"], early=[False, True])
def test_tables_have_the_gradients_of_one_process(rows: tuple[int, ...], mode: str, early: bool) -> None:
    """Of single rows and of bags, some of them padding, with weights where they are summed; some ranks have none."""
    table, pad = random(1, 7, 4), 2
    indices = torch.randint(7, (sum(rows), 3), generator=torch.Generator().manual_seed(2))
    weights = [random(3, sum(rows), 3)] * (mode == "sum")

    def look_up(i: Tensor, w: Tensor, p: Tensor | None = None) -> Tensor:
        if not mode:
            return F.embedding(i, w, pad)
        return F.embedding_bag(i, w, mode=mode, per_sample_weights=p, padding_idx=pad)

    def run(found: Tensor) -> None:
        (found**3 * torch.arange(1.0, 5)).sum().backward()

    whole, weighed = table.clone().requires_grad_(), [each.clone().requires_grad_() for each in weights]
    run(look_up(indices, whole, *weighed))

    def replica(late: LateMultiply, index: int) -> list[Tensor | None]:
        own, i = table.clone().requires_grad_(), own_of(indices, rows, index, 0)
        own_weights = [own_of(each, rows, index, 0).clone().requires_grad_() for each in weights]
        numbers = [3 * each for each in rows]
        if early:
            late.gather_indices([i], [numbers])
        gathered = 0 if early else None
        run(late.table(look_up, own, i, *own_weights, rows=rows if mode else numbers, gathered=gathered))
        late.finish()
        nbytes = 4 * 3 + 8 * (4 if mode else 12) + 8 * 3 * len(weights)
        assert late.transport.sent_bytes == (len(rows) - 1) * rows[index] * nbytes
        for one, other in zip(own_weights, weighed, strict=True):
            assert other.grad is not None
            torch.testing.assert_close(one.grad, own_of(other.grad, rows, index, 0), rtol=1e-12, atol=1e-12)
        return [own.grad]

    assert_replicas(on_replicas(len(rows), replica), [whole.grad])


@in_one
@pytest.mark.parametrize("alternating", [True, False])
def test_known_indices_of_all_microbatches_travel_from_the_last_forward_on(alternating: bool) -> None:
    """Two tables read them; without gradients nothing travels."""
    indices, tables = torch.tensor([[0, 1], [1, 1], [3, 0], [2, 1], [0, 0], [1, 3]]), [random(k, 4, 3) for k in (1, 2)]
    wholes = [table.clone().requires_grad_() for table in tables]
    torch.stack([F.embedding(indices, whole).square() for whole in wholes]).sum().backward()

    def replica(late: LateMultiply, index: int) -> list[Tensor | None]:
        w, events = [table.clone().requires_grad_() for table in tables], list[str]()
        note_gathers(late, events)

        def loss(k: int, piece: Tensor) -> Tensor:
            rows, is_last = [2, 4], k == 1
            late.gather_indices([piece, piece], [rows, rows], is_last)
            assert events == ["start"] * (is_last and torch.is_grad_enabled())
            given: dict[str, Any] = {"rows": rows, "is_last": is_last}
            found = [late.table(F.embedding, own, piece, gathered=n, **given) for n, own in enumerate(w)]
            return torch.stack(found).square().sum()

        pieces = list(enumerate(own_of(indices, (2, 4), index, 0).chunk(2)))
        with torch.no_grad():
            loss(*pieces[1])
        losses = (loss(*piece) for piece in pieces)
        for each in losses if alternating else list(losses):
            each.backward()
        assert events == ["start", "start"]
        late.finish()
        assert events[2:] == ["wait", "wait"]
        return [own.grad for own in w]

    assert_replicas(on_replicas(2, replica), [whole.grad for whole in wholes])
