"""Layers that a user adds to a stage of a build by hand: initialised, trained alike, exported, saved and resumed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from splitc.errors import LaunchError
from splitc.runtime.launch.main import load_worker
from splitc.runtime.transport.base import Transport
from splitc.runtime.worker import Worker
from tests.support.ranks import SEPARATION, Net, assert_same, batch_of, compile_net, on_ranks, one_process, sgd, train
from tests.support.sampling import sampled

Result = TypeVar("Result")
WARNING = r"weights.pt has no extra.weight of \w+.py, extra.bias of \w+.py: initialised by reset_parameters"


def model() -> Net:
    torch.manual_seed(1)
    return Net(norm=False)


class Extended(nn.Module):
    """What the edited build computes, in one process."""

    def __init__(self, extra: nn.Linear) -> None:
        super().__init__()
        self.net, self.extra = model(), extra

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.extra(self.net(images))
        return scores


def edited(folder: Path, strategy: str, world: int) -> tuple[Path, int]:
    """A build whose last stage has a layer more, and its global batch."""
    program = compile_net(model(), strategy, world)
    build = program.save(folder / "build")
    path = build / ("fc.py" if (build / "fc.py").exists() else "all.py")
    text = path.read_text().replace("super().__init__()", "super().__init__()\n        self.extra = nn.Linear(10, 10)")
    path.write_text(re.sub(r"F.cross_entropy\((.*), target([),])", r"F.cross_entropy(self.extra(\1), target\2", text))
    return build, program.plan.global_batch


def on_build(build: Path, world: int, run: Callable[[Worker], Result]) -> list[Result]:
    def call(transport: Transport) -> Result:
        return run(load_worker(build, transport, sgd))

    with pytest.warns(UserWarning, match=WARNING) as caught:
        results = on_ranks(world, call)
    assert len(caught) == 1
    return results


PLANS = [("data_parallel", 2), (SEPARATION, 3), ("layer_separation(n_c=1, n_f=2)", 3), ("late_multiply", 2)]


@sampled(("strategy", "world"), PLANS[1:] + PLANS[:1], one_in=4)
def test_an_added_layer_trains_as_in_one_process_and_is_in_the_state(strategy: str, world: int, tmp_path: Path) -> None:
    build, global_batch = edited(tmp_path, strategy, world)
    batches = [batch_of(global_batch) for _ in range(3)]

    def run(worker: Worker) -> tuple[dict[str, Tensor] | None, list[float], dict[str, Tensor] | None]:
        before = worker.state_dict()
        losses, after = train(worker, batches)
        worker.export(tmp_path / "model.pt")
        return before, losses, after

    before, losses, after = on_build(build, world, run)[0]
    assert before is not None and after is not None
    extra = nn.Linear(10, 10)
    extra.load_state_dict({key: before[f"extra.{key}"] for key in ("weight", "bias")})
    expected, state = one_process(Extended(extra), batches)
    assert losses == pytest.approx(expected, abs=1e-6)
    assert_same(after, {name.removeprefix("net."): tensor for name, tensor in state.items()})
    assert_same(torch.load(tmp_path / "model.pt"), after, tolerance=0.0)
    assert not torch.equal(after["extra.weight"], before["extra.weight"])


def test_an_added_layer_resumes_with_its_optimizer_bit_for_bit(tmp_path: Path) -> None:
    build, global_batch = edited(tmp_path, "data_parallel", 2)
    batches = [batch_of(global_batch) for _ in range(4)]

    def first(worker: Worker) -> tuple[list[float], dict[str, Tensor] | None]:
        train(worker, batches[:2])
        worker.save(tmp_path / "checkpoints")
        return train(worker, batches[2:])

    def second(worker: Worker) -> tuple[list[float], dict[str, Tensor] | None]:
        assert worker.resume(tmp_path / "checkpoints") == 2
        return train(worker, batches[2:])

    before, after = (on_build(build, 2, run)[0] for run in (first, second))
    assert before[0] == after[0]
    assert_same(after[1], before[1] or {}, tolerance=0.0)


REFUSED = ["modulo_shard(mp=2)", "parameter_server(servers=1)", "local_sgd(period=2)"]


@sampled("strategy", REFUSED, one_in=3)
def test_a_layer_whose_gradients_nobody_would_sum_is_refused_on_every_rank(strategy: str, tmp_path: Path) -> None:
    build = compile_net(model(), strategy, 2).save(tmp_path / "build")
    for path in build.glob("*.py"):
        text = path.read_text()
        path.write_text(
            text.replace("super().__init__()", "super().__init__()\n        self.extra = nn.Linear(10, 10)")
        )

    def refused(transport: Transport) -> str:
        with pytest.raises(LaunchError) as caught:
            load_worker(build, transport, sgd)
        return str(caught.value)

    for text in on_ranks(2, refused):
        assert "weights.pt has no extra.bias of" in text and "add it to the model, and compile that again" in text
