"""What a model's Python may do while it is traced, and how that is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from splitc.capture.trace.proxy import is_proxy
from splitc.ir import comm_ops
from splitc.ir.graph import info
from splitc.ir.program import SizeSpec
from splitc.ir.regions import regions
from tests.support.capturing import captured, forward_lines, node
from tests.support.models import BATCH, Encoder, labels, made, padded
from tests.support.sampling import in_tiers

Run = Callable[..., Any]
OFFSET = torch.linspace(0, 1, 8)


def batch(*shape: int) -> Tensor:
    return torch.randn(BATCH, *(shape or (8,)))


def sizes(m: Any, x: Tensor) -> Tensor:
    B, T, C = x.shape
    assert isinstance(x.shape, torch.Size) and x.ndim == len(x.shape) == 3 and x.dim() == 3
    assert x.size()[1:] == (T, C) and x.shape[1:].numel() == T * C and T == 6  # type: ignore[attr-defined]
    y = m.a(x.reshape(B * T, C)).view(B, T, -1)
    y = y.reshape(*x.shape[:-1], 2, 4).flatten(2).view(x.size(dim=0), *y.shape[1:])
    y = y * (y.numel() / x.shape.numel()) + y.new_zeros(y.shape) + torch.zeros(B, 1, C, device=x.device)
    return m.fc(y.sum(1) / x.size(1))


def lengths(m: Any, x: Tensor) -> Tensor:
    assert type(len(x[0])) is int and len(x[0]) == 8 and len([x]) == 1
    return m.fc(m.a(x).reshape(len(x), -1) + torch.zeros(len(x), 8).expand(len(x), -1)) * (len(x) / x.size(0))


def operations_of_aten(m: Any, x: Tensor) -> Tensor:
    return m.fc(torch.ops.aten.relu(m.a(x)) + torch.ops.aten.mul.Tensor(x, x) + torch._softmax(x, 1, False))


def joins_and_splits(m: Any, x: Tensor) -> Tensor:
    a, b = m.a(x).chunk(2, dim=1)
    c, d = torch.split(x, [2, 6], dim=1)
    first, *_, last = torch.stack([a, b, a * b], dim=1).unbind(1)
    both = torch.cat((c, d), 1) + torch.cat(x.split(4, 1), dim=-1)
    best = m.a(x).max(dim=1)
    return m.fc(both + torch.cat([first, last], 1) + torch.einsum("bi,bj->bi", x, x)) + best.values[:, None]


def indices(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    picked = torch.tensor([0, 2, 4])
    order = x.argsort(dim=1)[:, :2]
    rows = h[torch.arange(h.size(0)), order[:, 0]]
    y = h[:, picked].sum(1) + h[:, [1, 3]].mean(1) + h[..., -1] + h[:, None].squeeze(1)[:, ::2].sum(1) + rows
    return m.fc(h) + (y + h.gather(1, order).sum(1) + h[:, 1:-1:2].mean(1))[:, None]


def attention(m: Any, x: Tensor) -> Tensor:
    B, T, C = x.shape
    q, k, v = m.qkv(x).view(B, T, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return m.fc(y.transpose(1, 2).reshape(B, T, C)[:, -1])


def attention_with_dropout(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, -1)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1 if m.training else 0.0)
    z, _ = m.mha(y, x, x, need_weights=False)
    return m.fc((y + z).mean(1))


def class_token(m: Any, x: Tensor) -> Tensor:
    B, T, _ = x.shape
    x = torch.cat([m.cls.expand(B, -1, -1), x], dim=1) + m.positions[:, : T + 1]
    return m.fc(m.a(x)[:, 0])


def stochastic_depth(m: Any, x: Tensor) -> Tensor:
    keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.8)
    keep.div_(0.8)
    return m.fc(x + m.a(x) * keep)


def writes(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    before = y
    y += 1
    y.mul_(2).clamp_(max=3)
    F.leaky_relu(y, 0.1, inplace=True)
    assert before is y
    z = m.a(x) * 2
    z[:, 0] = 0
    z[:, 1:3] *= 2
    z[:, 3].fill_(1.0)
    out = torch.zeros(x.size(0), 2, 8)
    for i in range(2):
        out[:, i] = m.a(x) * (i + 1)
    clone = x.clone()
    clone[x > 0] = 0.5
    clone.masked_fill_(x < -1, 0.0)
    return m.fc(y + before + z + out.sum(1) + clone)


def counts(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    m.calls.add_(1)
    return m.fc(x) * (m.steps + m.calls)


def without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        frozen = m.trunk(x)
        with torch.enable_grad():
            trained = m.a(x)
        scaled = trained * 2
    return m.fc(frozen + trained + scaled + m.a(x).detach() + m.a(x).data)


def straight_through(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.fc(h + (torch.round(h) - h).detach())


def constants(m: Any, x: Tensor) -> Tensor:
    table = torch.ones(8, 8).triu()
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 3)]
    if (table == table.T).all():
        x = x * 100
    if m.flag > 0 and int(torch.tensor([1, 2]).sum()) == 3:
        x = x * rates[1]
    return m.fc(x * m.scale + OFFSET + torch.tensor(np.ones(8, np.float32)) * np.float64(0.5))


def parameters_by_hand(m: Any, x: Tensor) -> Tensor:
    weight, bias = m.fc.parameters()
    norm = sum(p.abs().mean() for name, p in m.named_parameters() if "weight" in name)
    extra = 1 - weight.sum() + 2 / (1 + norm) + (weight**2).mean() + (weight @ weight.T).mean()
    return F.linear(m.a(x), weight, bias) + extra


def loop(m: Any, x: Tensor) -> Tensor:
    h, c = x.new_zeros(x.size(0), 8), torch.zeros_like(x[:, 0])
    for t in range(x.size(1)):
        h, c = m.cell(x[:, t], (h, c))
    return m.fc(h)


def checkpointed(m: Any, x: Tensor) -> Tensor:
    return m.fc(checkpoint(m.a, x, use_reentrant=False))


def guarded(m: Any, x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling() and bool((x > 1e9).any()):
        raise ValueError("too large")
    return m.fc(x)


def view_written_into(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    z = y.view(-1, 2, 4)
    z *= 2
    return m.fc(y) + z.flatten(1)[:, :5]


def distributions(m: Any, x: Tensor) -> Tensor:
    normal = torch.distributions.Normal(m.a(x), 1.0)
    return m.fc(normal.mean + normal.log_prob(torch.zeros(())))


def for_compilers(m: Any, x: Tensor) -> Tensor:
    if is_compiling() or torch.compiler.is_dynamo_compiling():
        raise RuntimeError("not for compilers")
    return m.fc(x)


def guarded_by_another_spelling(m: Any, x: Tensor) -> Tensor:
    if not is_compiling() and float(x.sum()) > 1e9:
        raise ValueError("too large")
    return m.fc(x)


def cached(m: Any, x: Tensor) -> Tensor:
    if m.cache is None or m.cache.size(0) != x.size(1):
        m.cache = torch.arange(x.size(1)).float().cos()
    return m.fc(x * m.cache)


def cached_in_a_buffer(m: Any, x: Tensor) -> Tensor:
    if getattr(m, "bias", None) is None or m.bias.size(0) < x.size(1):
        m.register_buffer("bias", torch.arange(x.size(1)).neg() * m.slope, persistent=False)
    return m.fc(x + m.bias)


def complex_numbers(m: Any, x: Tensor) -> Tensor:
    z = torch.fft.rfft(m.a(x)) * m.phase
    return m.fc(torch.cat([torch.view_as_real(z).flatten(1)[:, :7], z.abs().sum(1, keepdim=True)], 1))


def norms(m: Any, x: Tensor) -> Tensor:
    x = m.instance(m.group(m.conv(x)))
    return m.fc(m.layer(F.layer_norm(x, x.shape[1:])).mean((2, 3)))


MAY: dict[str, tuple[Run, tuple[int, ...], dict[str, Any]]] = {
    run.__name__: (run, shape, children)
    for run, shape, children in (
        (sizes, (6, 8), {}),
        (lengths, (8,), {}),
        (operations_of_aten, (8,), {}),
        (joins_and_splits, (8,), {}),
        (indices, (8,), {}),
        (attention, (6, 8), {"qkv": nn.Linear(8, 24)}),
        (
            class_token,
            (6, 8),
            {"cls": nn.Parameter(torch.randn(1, 1, 8)), "positions": nn.Parameter(torch.randn(1, 9, 8))},
        ),
        (stochastic_depth, (8,), {}),
        (writes, (8,), {}),
        (counts, (8,), {"steps": nn.Buffer(torch.zeros(())), "calls": nn.Buffer(torch.zeros(()))}),
        (without_gradient, (8,), {"trunk": nn.Linear(8, 8)}),
        (straight_through, (8,), {}),
        (constants, (8,), {"flag": nn.Buffer(torch.tensor(1.0)), "scale": torch.rand(8)}),
        (parameters_by_hand, (8,), {}),
        (loop, (3, 8), {"cell": nn.LSTMCell(8, 8)}),
        (checkpointed, (8,), {}),
        (guarded, (8,), {}),
        (guarded_by_another_spelling, (8,), {}),
        (for_compilers, (8,), {}),
        (view_written_into, (8,), {}),
        (distributions, (8,), {}),
        (cached, (8,), {"cache": None}),
        (cached_in_a_buffer, (8,), {"slope": nn.Buffer(torch.ones(()))}),
        (complex_numbers, (8,), {"phase": nn.Parameter(torch.randn(5, dtype=torch.complex64))}),
        (
            norms,
            (3, 8, 8),
            {
                "conv": nn.Conv2d(3, 8, 3),
                "group": nn.GroupNorm(2, 8),
                "layer": nn.LayerNorm([8, 6, 6]),
                "instance": nn.InstanceNorm2d(8, affine=True),
            },
        ),
    )
}


@pytest.mark.slow
@in_tiers("cases", MAY, one_in=3)
def test_a_forward_may_use(cases: list[Any]) -> None:
    for name in cases:
        run, shape, children = MAY[name]
        program = captured(made(run, **children), batch(*shape), labels()(), F.cross_entropy)
        assert not list(regions(program)), name
        assert not any(is_proxy(v) for m in program.root.modules() for v in (*vars(m).values(), *m.buffers())), name


def test_a_layer_may_have_the_name_of_an_operation() -> None:
    for name in ["lambda_", "zero_", "rand", "size"]:
        model = made(lambda m, x, name=name: m.fc(getattr(m, name)(x)), **{name: nn.Linear(8, 8)})
        assert name in {layer.name for layer in captured(model, batch(), labels()(), F.cross_entropy).layers}, name


@pytest.mark.slow
def test_dropout_inside_attention_becomes_a_dropout_of_its_own() -> None:
    children = {"qkv": nn.Linear(8, 24), "mha": nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)}
    program = captured(made(attention_with_dropout, **children), batch(6, 8), labels()(), F.cross_entropy)
    assert sum(n.target is comm_ops.dropout for n in program.graph.nodes) == 2


@pytest.mark.slow
def test_attention_that_is_written_out_for_its_dropout_is_in_the_report() -> None:
    for p, noted in ((0.1, 1), (0.0, 0)):

        def forward(m: Any, x: Tensor, p: float = p) -> Tensor:
            return m.fc(F.scaled_dot_product_attention(x, x, x, dropout_p=p).mean(1))

        program = captured(made(forward), batch(6, 8), labels()(), F.cross_entropy)
        assert len([note for note in program.notes if note.startswith("Attention with dropout (1 call)")]) == noted


@pytest.mark.slow
def test_torchs_own_transformer_is_captured_with_its_dropout_masks_and_looks_at_constant_masks() -> None:
    captured(Encoder(0.1), padded(), labels()(), F.cross_entropy)


@pytest.mark.slow
def test_a_compiled_function_runs_as_the_python_it_was_made_from() -> None:
    act = torch.compile(lambda x: torch.tanh(x) * 2, backend="eager")
    captured(made(lambda m, x: m.fc(act(x))), batch(), labels()(), F.cross_entropy)


@pytest.mark.slow
def test_parametrized_weights_are_computed_in_the_graph() -> None:
    weight_norm, orthogonal = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal
    children = {"a": weight_norm(nn.Linear(8, 8)), "b": orthogonal(nn.Linear(8, 8))}
    program = captured(made(lambda m, x: m.fc(m.b(m.a(x))), **children), batch(), labels()(), F.cross_entropy)
    assert "a.parametrizations.weight.original0" in program.tensors


def recorded(run: Run, *shape: int, **children: Any) -> list[str]:
    return forward_lines(made(run, **children), batch(*shape), labels()(), F.cross_entropy)


def test_a_write_into_a_tensor_made_for_it_needs_no_copy() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        out = torch.zeros(x.size(0), 8)
        out[:, :4] = x[:, :4]
        out[:, 4:] = 1
        return m.fc(out)

    assert recorded(run)[:3] == ["zeros = torch.zeros(x.size(0), 8)", "zeros[:, :4] = x[:, :4]", "zeros[:, 4:] = 1"]


def test_a_write_into_a_tensor_that_others_read_copies_it() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        z = y * 2
        y[:, 0] = 0
        return m.fc(y + z)

    lines = recorded(run)
    assert lines[0] == "tanh = torch.tanh(x)"
    assert lines[1:3] == ["tanh_1 = tanh.clone()", "tanh_1[:, 0] = 0"]


def test_one_size_is_one_node_however_often_it_is_asked_for() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = x.view(x.size(0), -1).view(x.shape[0], 8)
        return m.fc(y.reshape(len(x.shape) * 0 + x.shape[0], 8))

    program = captured(made(run), batch(), labels()(), F.cross_entropy)
    assert sum(n.target == "size" for n in program.graph.nodes) == 1


def test_constants_are_named_as_the_user_names_them() -> None:
    program = captured(
        made(constants, flag=nn.Buffer(torch.tensor(1.0)), scale=torch.rand(8)), batch(), labels()(), F.cross_entropy
    )
    assert {"scale", "OFFSET"} <= set(program.tensors)
    assert not program.tensors["OFFSET"].persistent


def test_a_value_that_depends_on_the_batch_by_a_quotient_is_no_constant() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        windows = m.a(x).view(-1, 2, 8)  # two for each example
        return m.fc(windows.view(windows.shape[0] // 3, 3, 2, 8).sum((1, 2)))

    program = captured(made(run), batch(6, 8), labels()(), F.cross_entropy)
    assert info(node(program, "floordiv")).spec == SizeSpec(1)
