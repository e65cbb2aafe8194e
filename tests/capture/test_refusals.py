"""What a model's Python may not do, and how the user is told: his line, the reason, a remedy."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.capture import capture
from splitc.capture.example.example import Example
from splitc.capture.validate.validate import validate_capture
from splitc.errors import CaptureError
from tests.support.capturing import captured, here, refusal
from tests.support.models import CLASSES, labels, made, tokens, vectors
from tests.support.sampling import in_tiers

Run = Callable[..., Any]


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def branch(m: Any, x: Tensor) -> Tensor:
    if x.sum() > 0:  # here
        x = x * 2
    return m.fc(x)


def custom_function(m: Any, x: Tensor) -> Tensor:
    return m.fc(Sign.apply(x))  # type: ignore[no-untyped-call]  # here


def hook(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda g: g * 2)  # here
    return m.fc(h)


def inner_gradient(m: Any, x: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(m.fc(x).sum(), m.fc.weight, create_graph=True)  # here
    return m.fc(x) + g.sum()


def autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):  # here
        return m.fc(x)


def own_generator(m: Any, x: Tensor) -> Tensor:
    keep = torch.empty_like(x).bernoulli_(0.9, generator=torch.Generator().manual_seed(1))  # here
    return m.fc(x * keep)


def set_data(m: Any, x: Tensor) -> Tensor:
    x.data = x * 2  # here
    return m.fc(x)


def shared_memory(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y.t().mul_(2)
    return m.fc(y)  # here


def parameter_written(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.fc.weight.clamp_(-1, 1)  # here
    return m.fc(x)


def parameter_written_by_data(m: Any, x: Tensor) -> Tensor:
    m.fc.weight.data.clamp_(-1, 1)  # here
    return m.fc(x)


def assigned_another_shape(m: Any, x: Tensor) -> Tensor:
    m.mean = m.mean[:4]  # here
    return m.fc(x)


def assigned_another_tensor(m: Any, x: Tensor) -> Tensor:
    m.mean = m.fc.bias.data  # here
    return m.fc(x)


def kept_with_its_graph(m: Any, x: Tensor) -> Tensor:
    m.mean.mul_(m.fc.weight[0])  # here
    return m.fc(x)


def counter_in_a_branch(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x) if m.mean[0] > 0 else m.fc(2 * x)
    m.mean.add_(1)  # here
    return y


def counter_in_an_old_view(m: Any, x: Tensor) -> Tensor:
    first = m.mean[:1]
    m.mean.add_(1)
    return m.fc(x * first)  # here


def swallowed(m: Any, x: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        if x.mean() > 0:  # here
            return m.fc(2 * x)
    return m.fc(x)


def swallowed_first(m: Any, x: Tensor) -> Tensor:
    try:
        scale = float(x.mean())  # here
    except Exception:
        raise ValueError("the batch has no mean") from None
    return m.fc(x * scale)


def raw_norm(m: Any, x: Tensor) -> Tensor:
    y = torch.batch_norm(x, None, None, m.mean, m.mean + 1, True, 0.1, 1e-5, False)  # here
    return m.fc(y)


DATA = "depends on the data, so there is no one graph for all batches; use torch.where"
MAY_NOT: list[tuple[Run, str, dict[str, Any]]] = [
    (lambda m, x: m.fc(x) * x.mean().item(), f"item() needs the value of mean (HERE); its value {DATA}", {}),
    (branch, f"a branch needs the value of gt (HERE); its value {DATA}", {}),
    (lambda m, x: m.fc(x[x[:, 0] > 0]), f"getitem cannot be traced: its value {DATA}", {}),
    (lambda m, x: m.fc(x * float(np.asarray(x).mean())), "numpy needs the value of x (input)", {}),
    (
        custom_function,
        "the custom autograd function Sign has a backward that a traced graph would lose; write it with",
        {},
    ),
    (hook, "register_hook() acts on gradients on their way, which a graph would lose", {}),
    (inner_gradient, "torch.autograd.grad acts on gradients on their way", {}),
    (autocast, "forward enters torch.autocast in bfloat16 itself", {}),
    (lambda m, x: m.fc(x[:, torch.randperm(8)]), "randperm draws random numbers that cannot be seeded by example", {}),
    (own_generator, "bernoulli_ (a generator or an output of its own) draws random numbers that cannot be seeded", {}),
    (
        lambda m, x: m.fc(m.others[0](x)),
        "a parameter of shape (8, 8) is used that the model does not own",
        {"others": [nn.Linear(8, 8)]},
    ),
    (lambda m, x: torch.vmap(lambda row: m.fc.weight @ row)(x), "torch.vmap and torch.func are not traced", {}),
    (set_data, "sets .data of a tensor; make a new tensor instead", {}),
    (shared_memory, "a (HERE - 2) shares memory with t, into which HERE - 1 writes", {}),
    (parameter_written, "clamp_ writes into fc.weight while the model runs", {}),
    (parameter_written_by_data, "writes into fc.weight while the model runs", {}),
    (lambda m, x: m.fc(x * np.ones(8)), "mul is given a ndarray, which a graph cannot hold", {}),
    (
        lambda m, x: m.fc(x * torch.ops.aten.bernoulli(x.sigmoid())),
        "bernoulli is no function of torch, so generated code cannot call it",
        {},
    ),
    (assigned_another_shape, "mean is given another shape, dtype or kind", {"mean": nn.Buffer(torch.ones(8))}),
    (assigned_another_tensor, "mean is made the same memory as fc.bias", {"mean": nn.Buffer(torch.ones(CLASSES))}),
    (kept_with_its_graph, "mul_ keeps in mean how it was computed", {"mean": nn.Buffer(torch.ones(8))}),
    (counter_in_a_branch, "add_ changes mean, whose value forward has used", {"mean": nn.Buffer(torch.ones(8))}),
    (counter_in_an_old_view, "shares memory with mean, into which HERE - 1", {"mean": nn.Buffer(torch.ones(8))}),
    (swallowed, f"a branch needs the value of gt (HERE); its value {DATA}", {}),
    (swallowed_first, f"float() needs the value of mean (HERE); its value {DATA}", {}),
    (raw_norm, "batch_norm may change tensors that it is given", {"mean": nn.Buffer(torch.zeros(8))}),
    (
        lambda m, x: m.fc(x) + m.mean.gather(0, torch.arange(5), sparse_grad=True),
        "gather has sparse gradients, which ranks cannot sum",
        {"mean": nn.Parameter(torch.ones(8))},
    ),
    (
        lambda m, x: m.fc(x.missing),
        "AttributeError: 'FakeTensor' object has no attribute 'missing'; if the model itself runs",
        {},
    ),
]


@in_tiers("cases", MAY_NOT, one_in=3)
def test_a_forward_is_refused_at_its_line_with_a_remedy(cases: list[Any]) -> None:
    for run, text, children in cases:
        said = refusal(made(run, **children), vectors()(), labels()(), F.cross_entropy)
        line = here(run)
        file, _, number = line.partition(":")
        for back in (2, 1):
            text = text.replace(f"HERE - {back}", f"{file}:{int(number) - back}")
        assert said.startswith(f"{line}: ") and text.replace("HERE", line) in said


TABLE_OPTIONS = [
    ({"max_norm": 1.0}, "max_norm, which writes into its weight: ranks would differ; leave it out"),
    ({"scale_grad_by_freq": True}, "scale_grad_by_freq, which counts indices over the whole batch"),
]


def test_a_table_may_not_be_changed_or_counted_by_the_function_that_reads_it() -> None:
    for function, (options, text) in zip((F.embedding, F.embedding_bag), TABLE_OPTIONS, strict=True):

        def run(m: Any, x: Tensor, function: Any = function, options: Any = options) -> Tensor:
            return m.fc(function(x, m.table, **options).flatten(1)[:, :8])

        model = made(run, table=nn.Parameter(torch.ones(11, 8)))
        assert f"{function.__name__} has {text}" in refusal(model, tokens()(), labels()(), F.cross_entropy)


class Moments(NamedTuple):
    mean: Tensor
    variance: Tensor


@dataclass
class Held:
    mean: Tensor
    variance: Tensor


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "words"), [(Moments, "a Moments, which .* plain tuple"), (Held, "a Held, which")])
def test_code_that_stays_the_users_own_is_given_no_objects_with_names(kind: Any, words: str) -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return kind(y := super().forward(x), y.exp())

    def loss(made: Any, target: Tensor) -> Tensor:
        return F.gaussian_nll_loss(made.mean, target, made.variance)  # which branches on its data

    with pytest.raises(CaptureError, match=words):
        capture(net := Net(3, 2), Example.bind(net, torch.randn(4, 3), torch.randn(4, 2), loss))


def test_a_sparse_gradient_whose_rows_ranks_cannot_exchange_names_its_parameter() -> None:
    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, table: Tensor, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return table[x[:, 0]]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            with torch.sparse.check_sparse_tensor_invariants(False):
                return torch.sparse_coo_tensor(ctx.saved_tensors[0][:, 0][None], grads[0], (11, 8)), None

    gathered: Any = Gathered.apply

    def of_no_examples(m: Any, x: Tensor) -> Tensor:
        return m.fc(F.embedding(torch.arange(2), m.table, sparse=True).sum(0) + x.sum(1, keepdim=True))

    for run in (lambda m, x: m.fc(gathered(m.table, x)), of_no_examples):
        model = made(run, table=nn.Parameter(torch.ones(11, 8)))
        with pytest.raises(
            CaptureError, match="the gradient of table is sparse, and ranks exchange those of tables alone"
        ):
            bound = Example.bind(model, tokens()(), labels()(), F.cross_entropy)
            validate_capture(capture(model, bound), model, bound)


UNUSUAL: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a sparse tensor": (Tensor.to_sparse, ".to_dense()"),
    "an MKLDNN tensor": (Tensor.to_mkldnn, ".to_dense()"),
    "a nested tensor": (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), ".to_padded_tensor(0.0)"),
}


def test_a_batch_without_plain_memory_is_refused_in_one_line() -> None:
    for kind, name in [*zip(UNUSUAL, ("x", "target", "x"), strict=True)]:
        change, remedy = UNUSUAL[kind]
        batch = {"x": vectors()(), "target": torch.randn(4, CLASSES)}
        batch[name] = change(batch[name])
        said = refusal(made(lambda m, x: m.fc(x)), batch["x"], batch["target"], F.mse_loss)
        assert said == f"{name} is {kind}, whose examples ranks cannot take apart; give {name}{remedy}"


def test_an_operation_that_fails_may_be_caught_as_in_the_model() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        with contextlib.suppress(Exception):
            x = x.view(3, 3, 3)
        return m.fc(x)

    captured(made(run), vectors()(), labels()(), F.cross_entropy)


def test_numbers_drawn_in_python_are_refused() -> None:
    for draw, where in [(random.random, "Python's random"), (np.random.rand, "numpy.random")]:
        said = refusal(made(lambda m, x, draw=draw: m.fc(x * float(draw()))), vectors()(), labels()(), F.cross_entropy)
        assert said.startswith(f"Made: forward draws numbers from {where}")


def test_a_function_compiled_by_torch_jit_is_refused(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(DeprecationWarning):
        act = torch.jit.script(F.silu)

    def run(m: Any, x: Tensor) -> Tensor:
        return m.fc(act(x))  # here

    assert refusal(made(run), vectors()(), labels()(), F.cross_entropy).startswith(f"{here(run)}: silu is compiled by")


def test_tracing_leaves_torch_as_it_was_also_when_it_fails() -> None:
    before = (nn.Module.__call__, nn.Module.__getattr__, torch.zeros, torch.autograd.grad)
    with pytest.raises(CaptureError):
        captured(made(branch), vectors()(), labels()(), F.cross_entropy)
    after = (nn.Module.__call__, nn.Module.__getattr__, torch.zeros, torch.autograd.grad)
    assert before == after and not torch.compiler.is_compiling()


def test_a_traced_tensor_that_reaches_code_past_the_tracer_is_refused_and_does_not_crash() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch._C._functorch._add_batch_dim(x, 0, 1))  # here

    said = refusal(made(run), vectors()(), labels()(), F.cross_entropy)
    assert said.startswith(here(run))
