"""Model files and arguments of `splitc.compile` with mistakes, and models whose names try to become code."""

from __future__ import annotations

import ast
import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

import splitc
from benchmarks.fuzz.junk import junk, scalars, words
from splitc.cli import main
from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError
from splitc.ir.cluster import Cluster
from splitc.passes.planner.strategy import Strategy

_FILE = """import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        {forward}


{model}
{loss}
{example}
{target}
"""
_PARTS = {
    "forward": (
        "return self.second(F.relu(self.first(x)))",
        "return self.second(self.second(x))",
        "return None",
        "return 3",
        "return [self.first(x), 'text']",
        "return self.missing(x)",
        "raise ValueError('no forward')",
        "return self.first(x)[:, :3] if x.sum() > 0 else self.second(self.first(x))",
        "return self.second(self.first(x)).tolist()",
        "return x.numpy()",
        "return self.second(self.first(x.long()))",
        "while True: x = self.missing",
        "import sys; sys.exit(3)",
        "return self.forward(x)",
        "return torch.zeros(0, 3)",
        "return self.second(self.first(x)).sum()",
        "return self.second(self.first(x.float().nan_to_num()))",
        "yield x",
        "return (",
    ),
    "model": (
        "model = Net",
        "model = Net()",
        "model = 3",
        "model = None",
        "",
        "def model(x): return Net()",
        "model = nn.Linear",
        "model = lambda: 1 / 0",
        "model = Net().to('meta')",
        "model = nn.Sequential()",
        "raise RuntimeError('no')",
        "import nowhere_to_be_found",
        "import sys; sys.exit(1)",
        "model = Net().requires_grad_(False)",
    ),
    "loss": (
        "loss = F.cross_entropy",
        "loss = 3",
        "",
        "loss = nn.CrossEntropyLoss",
        "loss = lambda out: out",
        "loss = lambda out, target: None",
        "loss = lambda out, target: out",
        "loss = lambda out, target: 3.0",
        "loss = lambda a, b, c: a.sum()",
        "loss = lambda out, target: F.cross_entropy(out, target).item()",
        "loss = lambda out, target: 1 / 0",
        "loss = []",
    ),
    "example": (
        "example = (torch.randn(4, 6),)",
        "def example(batch=4): return (torch.randn(batch, 6),)",
        "example = torch.randn(4, 6)",
        "example = 3",
        "example = None",
        "example = ()",
        "example = {}",
        "example = {'x': torch.randn(4, 6)}",
        "example = {'y': torch.randn(4, 6)}",
        "example = {3: torch.randn(4, 6)}",
        "example = (torch.randn(0, 6),)",
        "example = (torch.randn(4, 7),)",
        "example = (torch.tensor(3.0),)",
        "example = (torch.zeros(4, 6, dtype=torch.int64),)",
        "example = (torch.full((4, 6), float('nan')),)",
        "example = (torch.randn(4, 6, dtype=torch.complex64),)",
        "example = (torch.randn(4, 6).to_sparse(),)",
        "example = (torch.randn(4, 6, device='meta'),)",
        "example = (torch.randn(4, 6), torch.randn(5))",
        "example = [[torch.randn(4, 6)], 'x', object()]",
        "example = lambda: 1 / 0",
        "example = (torch.randn(4, 6, dtype=torch.float64),)",
        "example = (torch.ones(4, 6, dtype=torch.bool),)",
    ),
    "target": (
        "target = torch.randint(3, (4,))",
        "def target(batch=4): return torch.randint(3, (batch,))",
        "target = torch.randint(3, (5,))",
        "target = torch.tensor(1)",
        "target = torch.randn(4)",
        "target = torch.full((4,), 7)",
        "target = torch.full((4,), -100)",
        "target = None",
        "target = 'x'",
        "target = []",
        "target = lambda: 1 / 0",
        "target = torch.randint(3, (0,))",
    ),
}


@st.composite
def model_files(draw: Any) -> str:
    """The text of a model file with one or two parts that are wrong."""
    names = draw(st.lists(st.sampled_from([*_PARTS]), min_size=1, max_size=2))
    return model_text({name: draw(st.sampled_from(_PARTS[name])) for name in names})


def model_text(parts: dict[str, str]) -> str:
    """The text of a model file with these parts, and valid ones for the others."""
    return _FILE.format(**{name: choices[0] for name, choices in _PARTS.items()} | parts)


def command(arguments: list[str]) -> None:
    """Run a command in this process; raises AssertionError for what is no clear error."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = main(arguments)
    sys.modules.pop("fuzzed_model", None)
    text = said.getvalue()
    if code not in (0, 1, 2) or "this is a bug of splitc" in text or "Traceback" in text:
        raise AssertionError(f"exit code {code}: {text[:300]}")
    if code:
        raise LaunchError(text)


def inspect(folder: Path, text: str) -> None:
    """Show the placement of a model file."""
    path = folder / "fuzzed_model.py"
    path.write_text(text)
    command(["inspect", str(path), "--world", "2", "--cluster", "v100-10gbe", "-q"])


arguments = st.dictionaries(
    st.sampled_from(
        (
            *("world", "example", "target", "loss", "global_batch", "cluster", "strategy", "pins", "memory"),
            *("microbatches", "autocast", "batch", "accumulate", "tune", "wire", "wire_error", "name", "plan"),
        )
    ),
    st.one_of(scalars, junk, words),
    min_size=1,
    max_size=2,
)
"""Arguments of `splitc.compile` that are wrong."""


def compile_with(model: nn.Module, batch: tuple[Any, ...], given: dict[str, Any]) -> None:
    valid = {"world": 2, "example": (batch[0],), "target": batch[1], "loss": F.cross_entropy, "cluster": "v100-10gbe"}
    splitc.compile(model, **{**valid, "strategy": "data_parallel", **given})


_ANY = st.one_of(
    scalars,
    junk,
    st.sampled_from((object(), int, len, b"x", range(3), torch.zeros(2), torch.float32, nn.Linear, [nn.ReLU()], ...)),
)
calls = st.tuples(
    st.sampled_from((*splitc.__all__, "verify", "rank", "ladder", "worker", "from_json", "batch")),
    st.lists(st.tuples(st.integers(0, 30), _ANY), min_size=1, max_size=2),
)
"""A name of the Python API, and values for some of its arguments, by their positions."""


def call(program: CompiledProgram, cluster: Cluster, batch: tuple[Any, ...], given: tuple[str, Any]) -> None:
    """Call it with these values in place of valid ones."""
    name, values = given
    small = {"model": nn.Linear(2, 2), "world": 1, "loss": F.mse_loss, "cluster": "v100-10gbe"}
    usual: dict[str, tuple[Any, dict[str, Any]]] = {
        "compile": (splitc.compile, {**small, "example": torch.zeros(4, 2), "target": torch.zeros(4, 2)}),
        "prepare": (splitc.prepare, {"model": nn.Linear(2, 2), "optimizer": torch.optim.SGD, "loss": None}),
        "Cluster": (splitc.Cluster, vars_of(cluster)),
        "Device": (splitc.Device, vars_of(cluster.device)),
        "Link": (splitc.Link, vars_of(cluster.link)),
        "Grouping": (splitc.Grouping, {"size": 2}),
        "verify": (program.verify, {"steps": 1}),
        "rank": (program.rank, {"rank": 0}),
        "ladder": (program.ladder, {"min_world": 1}),
        "worker": (program.worker, {"optimizer": torch.optim.SGD}),
        "from_json": (splitc.Plan.from_json, {"text": program.plan.to_json()}),
        "batch": (splitc.compile(**small).compile, {"batch": (torch.zeros(4, 2), torch.zeros(4, 2))}),  # type: ignore
    }
    if name not in usual:
        kind = getattr(splitc, name)
        if not (isinstance(kind, type) and issubclass(kind, Strategy)):
            return  # an error, or what only splitc makes
        usual[name] = kind, {}
    function, arguments = usual[name]
    known = [each for each in signature(function).parameters if each != "options"]
    arguments |= {known[place % len(known)]: value for place, value in values if known}
    function(**arguments)


def vars_of(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in fields(value)}


names = st.fixed_dictionaries(
    {
        "layer": words.filter(lambda text: text and "." not in text),
        "input": words,
        "title": words,
    }
)
"""What a user may name, in a model and beside it."""


class Named(nn.Module):
    """A model with a layer, an input and a constant of any names."""

    def __init__(self, layer: str, key: str) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, 3)
        self.register_module(layer, nn.Linear(4, 4))
        self.key = key

    def forward(self, batch: Any) -> torch.Tensor:
        scores: torch.Tensor = self.last(F.relu(self._modules[self.layer](batch[self.key])))  # type: ignore[misc]
        return scores


def compile_named(given: dict[str, str]) -> None:
    """Compile a model with these names, and read what was written."""
    layer = given["layer"]
    if hasattr(nn.Module(), layer) or layer in ("last", "layer", "key"):
        return
    model, tensor = Named(layer, given["input"]), torch.randn(4, 4)
    program = splitc.compile(
        model,
        2,
        {"batch": {given["input"]: tensor}},
        torch.randint(3, (4,)),
        F.cross_entropy,
        cluster="v100-10gbe",
        strategy="data_parallel",
        name=given["title"],
    )
    assert isinstance(program, CompiledProgram)
    for text in texts_of(program):
        require_only_texts(text)


def texts_of(program: CompiledProgram) -> Iterator[str]:
    """The generated Python files of a program."""
    yield from (text for name, text in program.files.items() if name.endswith(".py"))


def require_only_texts(text: str) -> None:
    """Raise AssertionError where a planted text is anything but a text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".system", "__import__")):
            raise AssertionError(f"a text became a call: {ast.unparse(node)}")
