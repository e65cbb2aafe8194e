"""Arguments of `splitc.compile` of no use are named, before the model is traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import CostError, LaunchError, PlacementError
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


COUNT, NEEDED = "it must be a whole number of at least 1", "it must be a finite number of more than 0"
WRONG: list[tuple[str, Any, str]] = [
    *(("world", value, f"world is {value!r}; {COUNT} and at most 100000") for value in (-1, 0, 2.5, "2", None, 10**6)),
    *(("global_batch", value, f"global_batch is {value!r}; {COUNT}") for value in (-1, "4", 1.0)),
    *(("accumulate", value, f"accumulate is {value!r}; {COUNT}") for value in (0, "x", None)),
    *(("memory", value, f"memory is {value!r}; {NEEDED}") for value in (-1, 0, "4GB", float("nan"), float("inf"))),
    *(("pins", value, "write a pattern of layers, and its role or Placement") for value in (3, "fc", [1], {3: "fc"})),
    *(("pins", {"fc": value}, f"pins has ('fc', {value!r}); write a pattern") for value in (3, None, ["fc"])),
    *(("plan", value, f"plan is {value!r}; give a Plan") for value in (3, "plan.json", [3])),
    *(("wire", value, f"wire is {value!r}; give a format") for value in (3, True, ["bf16"])),
    *(("strategy", value, f"strategy is {value!r}; give a name") for value in (3, None, ["auto"])),
]


@pytest.mark.parametrize(("name", "value", "text"), WRONG)
def test_a_value_of_no_use_is_named_before_the_model_is_traced(name: str, value: Any, text: str) -> None:
    given = {"world": 2, "cluster": "v100-10gbe", name: value}
    with pytest.raises(PlacementError) as caught:
        splitc.compile(Untraced(), example=torch.zeros(4, 2), target=torch.zeros(4), loss=F.mse_loss, **given)
    assert text in str(caught.value)


@pytest.mark.parametrize("sizes", [2.5, [None], ["4"], {"a": 1}, [[4]], torch.float32])
def test_sizes_that_are_no_numbers_of_examples_are_named(sizes: Any) -> None:
    def step(worker: Worker) -> None:
        with pytest.raises(LaunchError, match="give a whole number of examples for each reader"):
            worker.use_sizes(sizes)

    on_workers(plain("auto")[1], step)
