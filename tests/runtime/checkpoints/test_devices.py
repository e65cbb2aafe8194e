"""A run goes on where its tensors are: meta stands for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from splitc.runtime.optimizers import device_of_state, load_by_name, set_options, state_by_name

GPU = torch.device("meta")


def trained(shape: tuple[int, ...], **options: Any) -> tuple[torch.optim.Optimizer, list[tuple[str, nn.Parameter]]]:
    named = [("weight", nn.Parameter(torch.ones(shape)))]
    optimizer = torch.optim.Adam([p for _, p in named], **options)
    named[0][1].grad = torch.ones(shape)
    optimizer.step()
    return optimizer, named


def devices_after_loading(shape: tuple[int, ...], was: str, **options: Any) -> dict[str, str]:
    """Of the state of a parameter on a GPU that is loaded from the CPU, where checkpoints are unpacked."""
    optimizer, named = trained(shape)
    saved = state_by_name(optimizer, named)
    moved = [("weight", nn.Parameter(named[0][1].detach().to(GPU)))]
    other = torch.optim.Adam([p for _, p in moved])
    other.param_groups[0].update(options)
    saved["param_groups"] = [{**saved["param_groups"][0], **options}]
    load_by_name(other, moved, saved, {"weight": {"step": was, "exp_avg": was, "exp_avg_sq": was}})
    assert other.param_groups[0]["params"] == [moved[0][1]]
    return {key: value.device.type for key, value in other.state[moved[0][1]].items()}


@pytest.mark.parametrize("shape", [(), (3, 2)])
def test_the_state_of_an_optimizer_in_rounds_is_loaded_beside_its_parameter(shape: tuple[int, ...]) -> None:
    of_cpu = devices_after_loading(shape, "cpu")
    assert of_cpu == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}
    for of_gpu in (devices_after_loading(shape, "cuda"), devices_after_loading(shape, "cpu", capturable=True)):
        assert of_gpu == {"step": "meta", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_options_that_are_tensors_stay_on_their_device() -> None:
    group: dict[str, Any] = {"params": [1], "lr": torch.ones((), device=GPU), "eps": 1.0}
    set_options(group, {"params": [2], "lr": torch.zeros(()), "eps": 2.0, "decay": torch.zeros(())})
    assert group["params"] == [1] and group["eps"] == 2.0
    assert group["lr"].device == GPU and group["decay"].device.type == "cpu"


def test_what_is_no_counter_is_beside_its_parameter_whatever_its_shape() -> None:
    parameter = nn.Parameter(torch.ones(3, 2, device=GPU))
    assert device_of_state({}, parameter, "row", 1, "cpu") == GPU
    assert device_of_state({}, parameter, "mu_product", 0, "cpu").type == "cpu"
    assert device_of_state({"fused": True}, parameter, "step", 0, "cpu") == GPU
