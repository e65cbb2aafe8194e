"""Model files: functions or values, batches of any size, and the ways to name a model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from splitc.cli.example_input import parse_sizes, rows
from splitc.cli.model_file import ModelFile, load_model
from splitc.errors import CaptureError
from tests.support.command import NET, edited


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("net", "package", "package.net"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def write(text: str, name: str = "net.py") -> str:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)
    return name


def shapes(file: ModelFile) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in file.example.tensors.items()}


@pytest.mark.parametrize(
    "model", ["model = Net", "model = Net()", "def model():\n    return Net()", "model = lambda: Net()"]
)
def test_a_model_is_a_module_a_class_or_a_function(model: str) -> None:
    file = load_model(write(edited(model=model)))
    assert type(file.model).__name__ == "Net" and file.name == "Net"
    assert shapes(file) == {"x": (4, 6), "target": (4,)} and callable(file.example.loss)


def test_a_model_of_another_name_and_of_a_package() -> None:
    assert load_model(write(edited(model="other = Net")) + ":other").name == "Net"
    write("", "package/__init__.py")
    write(NET, "package/net.py")
    assert load_model("package.net:model").name == "Net"
    assert load_model("package.net:Net").name == "Net"


def test_a_sequential_is_called_after_its_file() -> None:
    assert load_model(write(edited(model="model = nn.Sequential(nn.Linear(6, 3))"))).name == "net"


def test_a_file_may_have_the_name_of_a_module_of_python() -> None:
    before = sys.modules["json"]
    assert load_model(write(NET, "json.py")).name == "Net"
    assert sys.modules["json"] is before


def test_a_file_is_read_anew_every_time() -> None:
    assert shapes(load_model(write(NET)))["x"] == (4, 6)
    assert shapes(load_model(write(NET.replace("batch=4", "batch=5"))))["x"] == (5, 6)


@pytest.mark.parametrize("loss", ["loss = nn.CrossEntropyLoss", "loss = nn.CrossEntropyLoss()"])
def test_a_loss_may_be_a_module_or_its_class(loss: str) -> None:
    assert isinstance(load_model(write(edited(loss=loss))).example.loss, nn.CrossEntropyLoss)


def test_a_loss_of_the_output_alone_needs_no_target() -> None:
    text = edited(loss="def loss(output):\n    return output.logsumexp(1).mean()", target="")
    assert not load_model(write(text)).example.targets


@pytest.mark.parametrize(
    "example", ["example = torch.randn(4, 6)", "example = [torch.randn(4, 6)]", "example = {'x': torch.randn(4, 6)}"]
)
def test_an_example_is_a_tensor_several_or_named_ones(example: str) -> None:
    assert shapes(load_model(write(edited(example=example)))) == {"x": (4, 6), "target": (4,)}


# -- --input -----------------------------------------------------------------------------------------------------------


def test_sizes_are_read_for_one_or_several_inputs() -> None:
    assert parse_sizes("32x3x224x224") == ((32, 3, 224, 224),)
    assert parse_sizes("4x3,4x7") == ((4, 3), (4, 7))
    assert parse_sizes("8") == ((8,),)


def test_functions_of_batch_make_the_batch_that_is_asked_for() -> None:
    file = load_model(write(NET), "7x6")
    assert shapes(file) == {"x": (7, 6), "target": (7,)}
    file = load_model(write(NET), "7")
    assert shapes(file) == {"x": (7, 6), "target": (7,)}


@pytest.mark.parametrize(("batch", "expected"), [(3, [0, 1, 2]), (6, [0, 1, 2, 0, 1, 2])])
@pytest.mark.parametrize("form", ["target = {}", "def target():\n    return {}"])
def test_a_target_that_is_there_is_cut_or_repeated(batch: int, expected: list[int], form: str) -> None:
    text = edited(target=form.format("torch.tensor([0, 1, 2])"), example="example = torch.randn(3, 6)")
    assert load_model(write(text), f"{batch}x6").example.targets["target"].tolist() == expected
    assert shapes(load_model(write(text), f"{batch}"))["x"] == (batch, 6)


def test_an_example_of_other_sizes_is_like_the_files_own() -> None:
    text = edited(example="example = {'x': torch.randn(4, 6), 'ids': torch.full((4, 2), 9), 'flag': True}")
    text = text.replace("def forward(self, x)", "def forward(self, x, ids, flag)")
    example = load_model(write(text), "5x6,5x3").example.inputs
    assert list(example) == ["x", "ids", "flag"] and example["flag"] is True
    assert example["x"].shape == (5, 6) and example["x"].dtype == torch.float32
    assert example["ids"].shape == (5, 3) and example["ids"].dtype == torch.int64
    assert int(example["ids"].max()) < 10


def test_input_stands_in_for_an_example_that_is_not_there() -> None:
    text = edited(example="", model="model = Net().double()")
    x = load_model(write(text), "5x6").example.inputs["x"]
    assert x.shape == (5, 6) and x.dtype == torch.float64
    with pytest.raises(CaptureError, match="give all sizes"):
        load_model(write(text), "5")


def test_rows_keep_scalars_and_go_into_tuples() -> None:
    first, second = rows((torch.arange(4), torch.tensor(1.0)), 2)
    assert isinstance(first, Tensor) and first.tolist() == [0, 1] and second.dim() == 0


@pytest.mark.parametrize("example", ["torch.randn(4, 6)", "lambda batch=4: torch.randn(batch, 6)", "None"])
def test_the_size_of_an_example_is_asked_before_it_is_made(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.cli.example_input._free_memory", lambda: 1e6)
    path = write(f"import torch\nmodel = torch.nn.Linear(6, 3)\nexample = {example}\n")
    assert len(load_model(path, "4x6").example.tensors) == 1
    for size in ("999999999x6", "999999999") if example != "None" else ("999999999x6",):
        with pytest.raises(CaptureError, match=r"999999999 rows takes 24.0 GB, its analysis 8 times .* has 1.00 MB"):
            load_model(path, size)
