"""Dropout as one operation: on the layouts and dtypes of torch, on fake tensors, and inside compiled stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from splitc.runtime.pieces import indices
from splitc.runtime.role_comm import RoleComm
from splitc.runtime.seeded import kernels
from splitc.runtime.seeded.draws import Draws, Layout
from tests.support.ranks import on_comms, plan_of
from tests.support.sampling import in_tiers

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

LAYOUTS = {  # shape, layout, intervals of examples, feature_dims
    "rows": ((8, 33), Layout(), [(3, 7), (20, 24)], 0),
    "several rows": ((8, 33), Layout(0, 2), [(3, 7)], 0),
    "in dim 1": ((5, 8, 6), Layout(1), [(2, 10)], 0),
    "in the last dim": ((40, 6), Layout(1), [(2, 8)], 0),
    "rows apart": ((8, 4, 7), Layout(0, 4, 2), [(1, 3)], 0),
    "no examples": ((8, 7), Layout(None), [(1, 3)], 0),
    "exchangeable": ((8, 7), Layout(), None, 0),
    "a shard": ((8, 7), Layout(columns=(5, 20)), [(0, 8)], 0),
    "a shard, in dim 1": ((6, 8, 7), Layout(1, columns=(5, 20)), [(0, 8)], 0),
    "channels": ((4, 6, 5, 3), Layout(), [(9, 13)], 2),
    "channels, in dim 1": ((4, 6, 5, 3), Layout(1), [(9, 15)], 2),
    "channels, in dim 3": ((4, 6, 5, 3), Layout(3), [(9, 12)], 2),
    "images": ((4, 6, 5, 3), Layout(), [(9, 13)], 0),
    "images, in dim 1": ((4, 6, 5, 3), Layout(1), [(9, 15)], 0),
    "a number": ((), Layout(), [(0, 1)], 0),
    "no rows": ((0, 6), Layout(), [(9, 9)], 0),
    "no columns": ((4, 0), Layout(), [(9, 13)], 0),
}


def strided(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same values, which lie in memory otherwise."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = {"contiguous": value}
    if value.dim() == 4:
        found["channels last"] = value.to(memory_format=torch.channels_last)
    if value.dim() > 1:
        found["transposed"] = value.transpose(-1, -2).contiguous().transpose(-1, -2)
        found["every second"] = torch.stack([value, value], -1)[..., 0]
    return found


def dropped(value: Tensor, p: float, name: str) -> Tensor:
    """A value of a layout after dropout."""
    _, layout, intervals, dims = LAYOUTS[name]
    examples = None if intervals is None else indices(intervals, value.device)
    return kernels.dropout(value, p, torch.tensor((3, 7, 0)), examples, (5, 1), layout, dims)


def run(value: Tensor, p: float, name: str) -> tuple[Tensor, Tensor]:
    """A value of a layout after dropout, and its gradient."""
    made = dropped(value.requires_grad_(), p, name)
    return made, torch.autograd.grad(made, value, value.detach())[0]


def expected(shape: tuple[int, ...], dtype: torch.dtype, p: float, name: str) -> Tensor:
    """A mask by its definition: a draw below the threshold is kept."""
    _, layout, examples, dims = LAYOUTS[name]
    drawn = torch.Size(shape[:dims] if dims else shape)
    if layout.dim is not None and layout.dim >= len(drawn):
        layout = Layout(None)
    words = Draws(3, 7, examples).words(drawn, torch.device("cpu"), (5, 1), layout)
    threshold = min(round((1 - p) * 2**32), 2**32 - 1) - 2**31
    kept = (words < threshold).view((*drawn, *[1] * (len(shape) - len(drawn)))).to(dtype)
    return kept / (1 - p) if p < 1 else kept * 0


@in_tiers("names", LAYOUTS, one_in=6)
def test_a_value_and_its_gradient_are_multiplied_by_the_mask_bit_for_bit(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        shape = LAYOUTS[name][0]
        for k, dtype in enumerate(DTYPES):
            for p in (0.1, 0.5, 1 / 3, 1.0)[k % 2 :: 2]:
                mask = expected(shape, dtype, p, name)
                for how, value in strided(shape, dtype).items():
                    monkeypatch.setattr(kernels, "_BLOCK", (7, 64, 1 << 16)[len(how) % 3])
                    value.requires_grad_()
                    got = dropped(value, p, name)
                    (gradient,) = torch.autograd.grad(got, value, value, create_graph=True)
                    (twice,) = torch.autograd.grad(gradient, value, value)
                    for found in (got, gradient, twice):
                        assert torch.equal(found, value * mask), (name, dtype, p, how)
                        assert found.stride() == torch.empty_like(value).stride(), (name, how)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_drops_what_the_cpu_drops_with_triton_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for fused in (kernels._fused, lambda value: None):
        monkeypatch.setattr(kernels, "_fused", fused)
        for name, (shape, *_) in LAYOUTS.items():
            for dtype, p in zip(DTYPES, (0.1, 0.5, 1 / 3, 1.0), strict=True):
                for how, value in strided(shape, dtype).items():
                    for one, other in zip(run(value.cuda(), p, name), run(value, p, name), strict=True):
                        assert torch.equal(one.cpu(), other) and one.stride() == other.stride(), (name, dtype, p, how)


def test_examples_that_a_step_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="random numbers for 9 examples, where the step has 8 here"):
        Draws(0, 0, [(0, 8)]).dropout(torch.ones(9, 2), 0.5, (0,), Layout())


def test_on_fake_tensors_and_on_meta_it_has_the_shapes_and_strides_of_real_ones() -> None:
    for name in ("images", "channels"):
        real = strided(LAYOUTS[name][0], torch.float32)["channels last"]
        kept = dropped(real, 0.5, name)
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(real).requires_grad_()
            made = dropped(fake, 0.5, name)
            (gradient,) = torch.autograd.grad(made, fake, made.detach())
            assert made.stride() == gradient.stride() == kept.stride()
        assert dropped(real.to("meta"), 0.5, name).stride() == kept.stride()


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, comm: RoleComm, x: Tensor) -> Tensor:
        h = comm.dropout(self.layer(x).relu(), 0.5, draw=0)
        out: Tensor = comm.dropout(self.layer(h), 0.25, draw=1, features=6)
        return out


@pytest.mark.slow
def test_a_compiled_stage_is_one_graph_in_all_steps_and_draws_what_one_process_draws() -> None:
    graphs = []

    def kept(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def run(comm: RoleComm) -> list[bool]:
        stage = Stage()
        stepped = torch.compile(stage, backend=kept, fullgraph=True)
        found = []
        for number, before in ((0, 0), (0, 8), (1, 0), (2, 0), (3, 0)):
            comm.shared.begin(replace(comm.shared.context, number=number, first_example=before))
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
            draws = Draws(0, number, [(before, before + 8)])
            h = draws.dropout(stage.layer(x).relu(), 0.5, (0,), Layout())
            one, other = stepped(comm, x), draws.dropout(stage.layer(h), 0.25, (1,), Layout())
            gradients = (torch.autograd.grad(each.sum(), x)[0] for each in (one, other))
            found.append(torch.equal(one, other) and torch.equal(*gradients))
        return found

    ((found),) = on_comms(plan_of(all=(0, 8)), run)
    assert found == [True] * 5 and len(graphs) == 1
