"""Random numbers for a program whose own are fake: parameters, buffers and inputs with which every node can run."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from splitc.ir.graph import shape_of
from splitc.ir.program import Program
from splitc.ir.value_range import class_bound
from splitc.runtime.own_code import plain_tensors


def real_root(program: Program, where: torch.device) -> nn.Module:
    """The program's modules with tensors of the same shapes and dtypes on `where`; tied ones stay tied.

    Matrices are about as torch initialises them, smaller parameters lie between 0 and 1; buffers (variances, masks,
    weights of classes) are 1, or valid indices where they are whole numbers.  The model's constants keep their data.
    """
    memo: dict[int, Any] = {id(t): t for t in plain_tensors(program.root).values()}  # shared, as in `fake_copy`
    for _, parameter in program.root.named_parameters():
        memo[id(parameter)] = nn.Parameter(_weights(parameter, where), parameter.requires_grad)
    owned = [node for node in program.graph.nodes if node.op == "get_attr"]
    like = [torch.empty(shape_of(node), device="meta") for node in owned]
    unknown: dict[str, torch.Tensor] = {}
    bounds = {str(n.target): class_bound(n, program.root, x, unknown.get) for n, x in zip(owned, like, strict=True)}
    for name, buffer in program.root.named_buffers():
        memo[id(buffer)] = _buffer(buffer, bounds.get(name), where)
    return copy.deepcopy(program.root, memo)


def random_inputs(program: Program, batch: int, where: torch.device) -> dict[str, torch.Tensor]:
    """The program's inputs at `batch` examples: normal numbers, targets between 0 and 1, whole numbers in range."""
    found = {}
    for each in program.inputs:
        shape, dtype = each.spec.at(batch), each.spec.dtype
        if dtype.is_floating_point or dtype.is_complex:
            draw = torch.rand if each.target else torch.randn
            found[each.name] = draw(shape, dtype=dtype, device=where)
        else:
            found[each.name] = (torch.randint(1 << 62, shape) % torch.tensor(each.high or 2)).to(where, dtype)
    return found


def _weights(like: torch.Tensor, where: torch.device) -> torch.Tensor:
    if like.dim() < 2:
        return torch.rand(like.shape, dtype=like.dtype, device=where)
    scale = math.sqrt(like.shape[0] / max(like.numel(), 1))
    return torch.randn(like.shape, dtype=like.dtype, device=where) * scale


def _buffer(like: torch.Tensor, bound: int | None, where: torch.device) -> torch.Tensor:
    if not isinstance(like, FakeTensor):
        return like.detach().to(where, copy=True)
    if like.dtype.is_floating_point or like.dtype.is_complex or like.dtype == torch.bool:
        return torch.ones(like.shape, dtype=like.dtype, device=where)
    return torch.randint(max(bound or 1, 1), like.shape, device=where).to(like.dtype)
