"""Arguments of `splitc.compile` of no use are named, before the model is traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from splitc.compiled import CompiledProgram
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import ArgumentError, CostError, LaunchError, PlacementError
from splitc.runtime.worker import Worker
from tests.support.ranks import on_workers, plain


class Untraced(nn.Module):
    """Fails when it is run, since what is wrong is known before."""

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("it was traced")


@pytest.mark.parametrize("cluster", [3, True, ["v100-10gbe"], "x" * 300 + ".toml"])
def test_a_cluster_of_no_use_is_named(cluster: Any) -> None:
    with pytest.raises(CostError, match=r"cluster is .*; give a known name|there is no such file"):
        load_cluster(cluster)


WHOLE, NUMBER = "it must be a whole number", "it must be a finite number"
WRONG: list[tuple[str, Any, str]] = [
    *(("world", value, f"world is {value!r}; {WHOLE}") for value in (-1, 0, 2.5, "2", None, 10**6)),
    *(("global_batch", value, f"global_batch is {value!r}; {WHOLE}") for value in (-1, "4", 1.0)),
    *(("accumulate", value, f"accumulate is {value!r}; {WHOLE}") for value in (0, "x", None)),
    *(("memory", value, f"memory is {value!r}; {NUMBER}") for value in (-1, 0, "4GB", float("nan"), float("inf"))),
    *(("pins", value, "pins is") for value in (3, "fc", [1])),
    ("pins", {3: "fc"}, "write a pattern of layers, and its role or Placement"),
    *(("pins", {"fc": value}, f"pins: fc is {value!r}; it must be a text or ") for value in (3, None, ["fc"])),
    *(("plan", value, f"plan is {value!r}; it must be") for value in (3, "plan.json", [3])),
    *(("wire", value, f"wire is {value!r}; it must be a text or ") for value in (3, True, ["bf16"])),
    *(("strategy", value, f"strategy is {value!r}; it must be a text or ") for value in (3, None, ["auto"])),
    *(("model", value, f"model is {value!r}; it must be a Module or a function") for value in (3, None, "net", [3])),
    ("model", lambda: 3, "returns no module"),
    ("model", nn.Linear, "which cannot be called: missing a required argument: 'in_features'"),
    *(("loss", value, f"loss is {value!r}; it must be a function") for value in (3, True)),
    ("name", 3, "name is 3; it must be a text"),
    ("watch", object(), "watch is of type object; it must be a function"),
    ("example", 3, "example is 3; it must be a Tensor or a list or a table"),
]


@pytest.mark.parametrize(("name", "value", "text"), WRONG)
def test_a_value_of_no_use_is_named_before_the_model_is_traced(name: str, value: Any, text: str) -> None:
    usual = {"model": Untraced(), "example": torch.zeros(4, 2), "target": torch.zeros(4), "loss": F.mse_loss}
    with pytest.raises((PlacementError, ArgumentError)) as caught:
        splitc.compile(**{**usual, "world": 2, "cluster": "v100-10gbe", name: value})
    assert text in str(caught.value)


@pytest.mark.parametrize("sizes", [2.5, [None], ["4"], {"a": 1}, [[4]], torch.float32])
def test_sizes_that_are_no_numbers_of_examples_are_named(sizes: Any) -> None:
    def step(worker: Worker) -> None:
        with pytest.raises(LaunchError, match="give a whole number of examples for each reader"):
            worker.use_sizes(sizes)

    on_workers(plain("auto")[1], step)


def test_arguments_of_the_rest_of_the_interface_are_named() -> None:
    loader = torch.utils.data.DataLoader(torch.zeros(4, 2))  # type: ignore[arg-type, var-annotated]
    deferred: Any = splitc.compile(Untraced(), 2, loss=F.mse_loss, cluster="v100-10gbe")
    cluster, verify = load_cluster("v100-10gbe"), partial(CompiledProgram.verify, object())  # type: ignore[arg-type]
    calls: dict[str, Callable[[], object]] = {
        "prepare: loader is 3; it must be a DataLoader": lambda: splitc.prepare(nn.ReLU(), print, None, 3),  # type: ignore
        "prepare: optimizer is None": lambda: splitc.prepare(nn.ReLU(), None, None, loader),  # type: ignore[arg-type]
        "prepare has no option x": lambda: splitc.prepare(nn.ReLU(), torch.optim.SGD, None, loader, x=3),
        "Link: bandwidth is '1g'; it must be a finite number": lambda: splitc.Link("1g", 0.0),  # type: ignore[arg-type]
        "Link: missing a required argument: 'bandwidth'": lambda: splitc.Link(),  # type: ignore[call-arg]
        "Device: memory is -1": lambda: replace(cluster.device, memory=-1),
        "Cluster: link is 3": lambda: replace(cluster, link=3),  # type: ignore[arg-type]
        "Grouping: size is None": lambda: splitc.Grouping(None),  # type: ignore[arg-type]
        "DeferredProgram.compile: batch is 3": lambda: deferred.compile(3),
        "verify: steps is 0; it must be a whole number of at least 1": lambda: verify(steps=0),
        "verify: dtype is torch.int64; it must be a dtype of floating": lambda: verify(dtype=torch.int64),
    }
    for text, call in calls.items():
        with pytest.raises(ArgumentError) as caught:
            call()
        assert text in str(caught.value) and isinstance(caught.value, TypeError)
    link = {"bandwidth": 1e9, "latency": 0}
    assert replace(cluster, link=link).link == splitc.Link(1e9, 0)  # type: ignore[arg-type]
