"""`splitc export` writes the model of a checkpoint into one file, whatever the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from splitc.runtime.worker import Worker
from tests.runtime.checkpoints.test_resume import assert_equal, batches_of, steps
from tests.runtime.test_worker_state import Tied, token_batch
from tests.support.command import splitc
from tests.support.compiled import compiled
from tests.support.every_strategy import planned
from tests.support.ranks import adam, on_workers

Capture = pytest.CaptureFixture[str]
DIVIDED = "modulo_shard(mp=2,scheme=B/K,updates=every)"


def trained(strategy: str, run: Path) -> dict[str, torch.Tensor]:
    """A run with checkpoints after two steps and three; the model's state after three."""
    program = planned(2, strategy, norm=True)

    def train(worker: Worker) -> dict[str, torch.Tensor] | None:
        batches = batches_of(program, 3)
        steps(worker, batches[:2])
        worker.save(run)
        steps(worker, batches[2:])
        worker.save(run)
        return worker.state_dict()

    state = on_workers(program, train, optimizer=adam)[0]
    assert state is not None
    return state


def test_a_divided_model_goes_through_safetensors_bit_for_bit(tmp_path: Path, capsys: Capture) -> None:
    safetensors = pytest.importorskip("safetensors", reason="needs safetensors, the extra safetensors")
    loaded = pytest.importorskip("safetensors.torch").load_file
    state = trained(DIVIDED, tmp_path / "run")
    file = tmp_path / "model.safetensors"
    done = splitc(capsys, f"export {tmp_path / 'run'} --safetensors {file}")
    assert (done.code, done.err, done.out) == (0, "", f"wrote {file}: the model after 3 steps\n")
    got = loaded(file)
    assert_equal(got, {name: state[name] for name in got})
    assert got.keys() == state.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "run"]
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "step": "3"}


def odd() -> nn.Module:
    """Tied parameters, unused ones, and numbers of other kinds, in buffers."""
    model = Tied()
    for name, value in (
        ("number", torch.tensor(3)),
        ("complex", torch.tensor([1 + 2j])),
        ("short", torch.randn(5).bfloat16()),
        ("flags", torch.tensor([True, False])),
    ):
        model.register_buffer(name, value)
    return model


@pytest.mark.slow
def test_tied_and_odd_tensors_load_into_the_model(tmp_path: Path, capsys: Capture) -> None:
    model = odd()
    ids, target = token_batch(4)
    program = compiled(model, (ids,), target, F.cross_entropy, 2, "parameter_server(servers=2, beside=True)")
    on_workers(program, lambda worker: worker.save(tmp_path / "run"))
    assert splitc(capsys, f"export {tmp_path}/run/step-000000 --torch {tmp_path}/model").code == 0
    state = torch.load(tmp_path / "model", weights_only=True)
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert_loads(state, model)
    load_file = pytest.importorskip("safetensors.torch", reason="needs safetensors, the extra safetensors").load_file
    assert splitc(capsys, f"export {tmp_path}/run/step-000000 --safetensors {tmp_path}/model").code == 0
    assert_loads(load_file(tmp_path / "model"), model)


def assert_loads(state: dict[str, torch.Tensor], model: nn.Module) -> None:
    """Into a model of the class it makes the same model, bit for bit."""
    other = odd()
    other.load_state_dict(state)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_aloud_and_named_where_it_is_asked_for(
    tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    trained("data_parallel", run)
    (run / "step-000003" / "__0_0.distcp").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"step-000003: missing or damaged: __0_0.distcp; step-000002 is taken"):
        done = splitc(capsys, f"export {run} --torch {tmp_path / 'model.pt'}")
    assert done.out.endswith("the model after 2 steps\n")
    done = splitc(capsys, f"export {run}/step-000003 --torch {tmp_path / 'other.pt'}")
    assert done.code == 2 and "no checkpoint is whole" in done.err
    assert not (tmp_path / "other.pt").exists()


def test_wrong_uses_are_named_before_anything_is_written(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitc.cli.exporting.find_spec", lambda name: None)
    for line, text in (
        (f"export {tmp_path}", "give either --torch FILE or --safetensors FILE"),
        (f"export {tmp_path} --torch {tmp_path}", "it is a folder; give a file"),
        (f"export {tmp_path} --safetensors {tmp_path}/a", 'run: pip install "splitc[safetensors]"'),
        (f"export {tmp_path} --torch {tmp_path}/a", "there is no checkpoint; give the folder of a run"),
        (f"export {tmp_path}/nosuch --torch {tmp_path}/a", "there is no checkpoint; give the folder of a run"),
    ):
        done = splitc(capsys, line)
        assert done.code == 2 and text in done.err, done.err
    assert list(tmp_path.iterdir()) == []
