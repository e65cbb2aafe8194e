"""Stages filled from whole-model weights."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from splitc.errors import LaunchError
from splitc.runtime.spec import Shard
from splitc.runtime.transport.simulated import run_ranks
from splitc.runtime.weights import Tree, build, first_names, part_of

CPU = torch.device("cpu")


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"0": nn.Linear(3, 4), "1": nn.BatchNorm1d(4)})
        self.head = nn.Linear(4, 2)
        self.head.requires_grad_(False)
        self.register_buffer("mask", torch.empty((2,), dtype=torch.bool), persistent=False)


def weights() -> dict[str, Tensor]:
    stage = Stage()
    stage.body["1"].num_batches_tracked.fill_(7)  # type: ignore[operator]
    return {**stage.state_dict(), "mask": torch.tensor([True, False]), "elsewhere.weight": torch.zeros(9)}


def test_a_stage_has_the_values_dtypes_and_flags_of_its_weights_and_is_in_training_mode() -> None:
    given = {k: v.double() if v.is_floating_point() else v for k, v in weights().items()}
    stage = build(Stage, given, CPU)
    for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
        assert tensor.dtype == given[name].dtype, name
        assert torch.equal(tensor, given[name]), name
    assert {name for name, p in stage.named_parameters() if not p.requires_grad} == {"head.weight", "head.bias"}
    assert stage.training
    assert set(stage.state_dict()) == set(given) - {"mask", "elsewhere.weight"}


def test_all_missing_and_misshapen_weights_are_named_at_once() -> None:
    given = weights()
    del given["body.1.running_mean"]
    given["head.weight"] = torch.zeros(5, 4)
    with pytest.raises(LaunchError) as caught:
        build(Stage, given, CPU)
    assert str(caught.value).splitlines() == [
        "the weights do not fit this stage:",
        "  - head.weight: needs shape (2, 4), has (5, 4)",
        "  - body.1.running_mean: needs shape (4,), missing",
    ]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_parameters_stay_tied_and_are_copied_once() -> None:
    values = torch.randn(5, 3)
    stage = build(Tied, {"embed.weight": values, "head.weight": values.clone()}, CPU)
    assert stage.get_parameter("head.weight") is stage.get_parameter("embed.weight")
    assert torch.equal(stage.get_parameter("head.weight"), values)
    with pytest.raises(LaunchError) as caught:
        build(Tied, {"embed.weight": values[:2], "head.weight": values[:2]}, CPU)
    assert str(caught.value).count("has (2, 3)") == 1


def test_a_tree_takes_the_names_that_a_module_dict_refuses() -> None:
    tree = Tree({"keys": nn.Linear(1, 1), "values": Tree({"pop": nn.ReLU()}), "0": nn.Linear(1, 2)})
    assert list(tree.state_dict()) == ["keys.weight", "keys.bias", "0.weight", "0.bias"]
    assert isinstance(tree["values"]["pop"], nn.ReLU)  # type: ignore[index]
    assert isinstance(Tree()._modules, dict)


def test_first_names_tell_which_keys_are_one_tensor() -> None:
    tied = Tied()
    tied.other = nn.Linear(3, 5, bias=False)
    assert first_names(tied.state_dict()) == {
        "embed.weight": "embed.weight",
        "head.weight": "embed.weight",
        "other.weight": "other.weight",
    }


def test_a_stage_takes_its_parts_of_weights_and_the_whole_of_the_others() -> None:
    given = {name: torch.randn(t.shape) if t.is_floating_point() else t for name, t in weights().items()}
    shares = {
        "body.0.weight": Shard(0, 1, 4),
        "body.0.bias": Shard(0, 1, 4),
        "head.weight": Shard(1, 3, 4),
        "head.bias": Shard(0, 2, 2),
    }
    stage = build(Stage, given, CPU, shares)
    for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
        assert torch.equal(tensor, part_of(given[name], shares.get(name))), name
        assert tensor.is_contiguous()
    assert tuple(stage.get_parameter("head.weight").shape) == (2, 1)
    assert tuple(stage.get_parameter("head.bias").shape) == (0,)
    assert {name for name, p in stage.named_parameters() if not p.requires_grad} == {"head.weight", "head.bias"}
    with torch.no_grad():
        stage.get_parameter("body.0.weight").zero_()
    assert bool(given["body.0.weight"][1:].any())  # a copy of its part


def test_a_part_keeps_no_memory_of_the_whole() -> None:
    stage = build(Stage, weights(), CPU, {"body.0.weight": Shard(0, 0, 1), "head.weight": Shard(1, 0, 1)})
    for name in ("body.0.weight", "head.weight"):
        parameter = stage.get_parameter(name)
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


class Extended(Stage):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.MultiheadAttention(3, 1))
        self.extra.tied = nn.Linear(3, 4)
        self.extra.tied.weight = self.body.get_parameter("0.weight")


def test_a_layer_that_the_weights_do_not_have_initialises_itself_alike_each_time_and_draws_nothing() -> None:
    given, before = {**weights(), "extra.tied.bias": torch.ones(4)}, torch.get_rng_state()
    stage, again = build(Extended, given, CPU), build(Extended, given, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    for name, tensor in stage.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
        assert tensor.isfinite().all(), name
    for name, tensor in given.items():
        if name != "elsewhere.weight" and name in stage.state_dict():
            assert torch.equal(stage.state_dict()[name], tensor), name
    drawn = stage.get_parameter("extra.0.weight")
    assert drawn.requires_grad and 0 < float(drawn.detach().abs().max()) < 2**-0.5 and drawn.unique().numel() == 6
    assert bool((stage.get_buffer("extra.1.running_var") == 1).all()) and stage.training
    assert stage.get_parameter("extra.tied.weight") is stage.get_parameter("body.0.weight")


class Raw(Stage):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_ranks_on_threads_initialise_an_added_layer_alike_whatever_they_draw_between() -> None:
    class Slow(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.normal_(self.weight)
            time.sleep(0.05)  # for other ranks, which draw from the same generator of the process
            nn.init.normal_(self.bias)

    class Grown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extra = Slow(3, 3)

    first, *others = run_ranks(3, lambda transport: build(Grown, {}, CPU).state_dict())
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())


def test_a_parameter_whose_module_cannot_initialise_it_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"scale: needs shape \(3,\), missing"):
        build(Raw, weights(), CPU)
