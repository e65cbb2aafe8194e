"""An exported file has the whole model, while no rank holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.errors import LaunchError
from splitc.ir.placements import Placement
from splitc.runtime import files
from splitc.runtime.worker import Worker
from tests.runtime.checkpoints.test_resume import assert_equal, small
from tests.runtime.test_worker_state import Tied, token_batch
from tests.support.compiled import compiled
from tests.support.file_memory import in_processes
from tests.support.ranks import on_workers


@pytest.mark.slow
def test_tied_unused_and_odd_tensors_are_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MAPPED", 0)  # so that the file is mapped for each tensor
    model = Tied()
    model.register_buffer("number", torch.tensor(3))
    model.register_buffer("nothing", torch.zeros(0, 3))
    model.register_buffer("complex", torch.tensor([1 + 2j]))
    model.gain = nn.Parameter(torch.tensor(2.0))
    ids, target = token_batch(4)
    for strategy in ("data_parallel", "parameter_server(servers=2, beside=True)"):
        program = compiled(model, (ids,), target, F.cross_entropy, 2, strategy)
        on_workers(program, lambda worker: worker.export(tmp_path / "model.pt"))
        got = torch.load(tmp_path / "model.pt", weights_only=True)
        assert_equal(got, dict(model.state_dict()))
        assert got["embed.weight"].data_ptr() == got["head.weight"].data_ptr()
        assert got["alias.weight"].data_ptr() == got["layers.0.weight"].data_ptr()


def test_a_file_that_cannot_be_made_is_an_error_on_every_rank(tmp_path: Path) -> None:
    def run(worker: Worker) -> str:
        with pytest.raises(LaunchError) as caught:
            worker.export(tmp_path / "missing" / "model.pt")
        return str(caught.value)

    (text,) = set(on_workers(small(), run))
    assert "rank 0: " in text
    assert "missing" in text


def test_an_export_that_breaks_off_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"
    path.write_text("an earlier one")

    def killed(*arguments: Any) -> Tensor:
        raise InterruptedError

    monkeypatch.setattr(files.StateFile, "__getitem__", killed)
    with pytest.raises(InterruptedError):
        on_workers(small(), lambda worker: worker.export(path))
    assert path.read_text() == "an earlier one"


@pytest.mark.slow
@pytest.mark.processes
def test_no_rank_holds_more_than_its_part_while_a_build_is_loaded_and_exported(tmp_path: Path) -> None:
    width = 2048
    hidden = [module for _ in range(12) for module in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(width, 4))
    sharded = {"[0-9]*": Placement(holding="sharded", group=4, split="columns")}
    example = torch.randn(8, width), torch.randint(4, (8,))
    program = compiled(model, *example, F.cross_entropy, 4, "modulo_shard(mp=4)", pins=sharded)
    whole = sum(tensor.nbytes for tensor in model.state_dict().values())
    for found in in_processes(program, tmp_path):
        assert found.held < 0.26 * whole
        assert found.loaded < found.held + 4e6
        assert found.exporting < 0.15 * whole
    exported = torch.load(tmp_path / "model.pt", weights_only=True, mmap=True)
    assert_equal(exported, dict(model.state_dict()))
