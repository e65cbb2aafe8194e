"""Model files: functions or values, batches of any size, and the ways to name a model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from splitc.cli.example_input import parse_sizes
from splitc.cli.model_file import ModelFile, load_model
from splitc.errors import CaptureError
from tests.support.command import NET, edited

pytestmark = pytest.mark.usefixtures("net")


def write(text: str, name: str = "net.py") -> str:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)
    return name


def shapes(file: ModelFile) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in file.example.tensors.items()}


def test_a_model_is_a_module_a_class_or_a_function_and_a_loss_a_function_or_a_module() -> None:
    for model in ("model = Net", "model = Net()", "def model():\n    return Net()", "model = lambda: Net()"):
        file = load_model(write(edited(model=model)))
        assert type(file.model).__name__ == "Net" and file.name == "Net"
        assert shapes(file) == {"x": (4, 6), "target": (4,)} and callable(file.example.loss)
    for loss in ("loss = nn.CrossEntropyLoss", "loss = nn.CrossEntropyLoss()"):
        assert isinstance(load_model(write(edited(loss=loss))).example.loss, nn.CrossEntropyLoss)


def test_a_model_of_another_name_and_of_a_package() -> None:
    assert load_model(write(edited(model="other = Net")) + ":other").name == "Net"
    write("", "package/__init__.py")
    write(NET, "package/net.py")
    assert load_model("package.net:model").name == "Net"
    assert load_model("package.net:Net").name == "Net"


def test_a_file_may_have_the_name_of_a_module_of_python() -> None:
    before = sys.modules["json"]
    assert load_model(write(NET, "json.py")).name == "Net"
    assert sys.modules["json"] is before


def test_a_loss_of_the_output_alone_needs_no_target() -> None:
    text = edited(loss="def loss(output):\n    return output.logsumexp(1).mean()", target="")
    assert not load_model(write(text)).example.targets


def test_an_example_is_a_tensor_several_or_named_ones() -> None:
    for example in ("torch.randn(4, 6)", "[torch.randn(4, 6)]", "{'x': torch.randn(4, 6)}"):
        assert shapes(load_model(write(edited(example=f"example = {example}")))) == {"x": (4, 6), "target": (4,)}


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


def test_a_target_that_is_there_is_cut_or_repeated() -> None:
    for form in ("target = {}", "def target():\n    return {}"):
        path = write(edited(target=form.format("torch.tensor([0, 1, 2])"), example="example = torch.randn(3, 6)"))
        for batch, expected in ((3, [0, 1, 2]), (6, [0, 1, 2, 0, 1, 2])):
            assert load_model(path, f"{batch}x6").example.targets["target"].tolist() == expected
            assert shapes(load_model(path, f"{batch}"))["x"] == (batch, 6)


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


@pytest.mark.parametrize("example", ["torch.randn(4, 6)", "lambda batch=4: torch.randn(batch, 6)", "None"])
def test_the_size_of_an_example_is_asked_before_it_is_made(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.cli.example_input.free_memory", lambda: 1e6)
    path = write(f"import torch\nmodel = torch.nn.Linear(6, 3)\nexample = {example}\n")
    assert len(load_model(path, "4x6").example.tensors) == 1
    for size in ("999999999x6", "999999999") if example != "None" else ("999999999x6",):
        with pytest.raises(CaptureError, match=r"999999999 rows takes 24.0 GB, its analysis 8 times .* has 1.00 MB"):
            load_model(path, size)
