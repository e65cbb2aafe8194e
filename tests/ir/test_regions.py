"""What stands in for a region: results of the right shapes and dtypes at any batch, gradients, and saved bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from splitc.ir.program import TensorSpec
from splitc.ir.regions import OwnCode, Region, is_inside, names_in

OUTPUT = {"y": TensorSpec((4, 2), torch.float32, 0, True), "n": [TensorSpec((), torch.int64), None]}


def region(output: Any) -> Region:
    return Region(nn.Linear(3, 2), OwnCode("a", False, "m.py:1: item()", None, output, (0, 1, 2), (8.0, 16.0)))


def test_results_have_the_containers_shapes_and_dtypes_of_the_module() -> None:
    made = region(OUTPUT)(torch.zeros(5, 6), scale=2)  # 3 examples of two rows along dim 1
    assert made["y"].shape == (12, 2)
    assert made["y"].requires_grad
    assert (made["n"][0].dtype, made["n"][1]) == (torch.int64, None)


def test_gradients_reach_inputs_and_parameters() -> None:
    stand_in, x = region(OUTPUT), torch.zeros(5, 6, requires_grad=True)
    stand_in(x)["y"].sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is not None for parameter in stand_in.parameters())


def test_as_many_bytes_are_saved_as_the_module_saves() -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = torch.zeros(5, 6)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        region(OUTPUT)(x)
    assert sum(tensor.nbytes for tensor in saved) == 8 + 3 * 16 + x.nbytes


def test_tensors_have_their_own_names() -> None:
    root = nn.ModuleDict({"a": region(OUTPUT)})
    assert names_in(root, "a") == ["a.weight", "a.bias"]
    assert names_in(region(OUTPUT), "") == ["weight", "bias"]


def test_the_loss_is_outside_of_the_model() -> None:
    assert is_inside("blocks.3.fc", "blocks.3")
    assert is_inside("blocks.3", "")
    assert not is_inside("blocks.31", "blocks.3")
    assert not is_inside("loss", "")
