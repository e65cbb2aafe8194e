"""Digests of models: the same for the same code and state, another after any change, none where a change could hide."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.code_digest import code_digest
from splitc.capture.example import Example
from tests import ROOT
from tests.support.small_programs import Row

HELPERS = """
import math
SCALE = 2.0
TABLE = {"a": [1, 2]}

def helper(x, power=2):
    return x * SCALE + inner(x) ** power

def inner(x):
    return x * TABLE["a"][0] + math.pi
"""

NET = """
import torch
import torch.nn.functional as F
from torch import nn
import digested_helpers as h
from digested_helpers import helper

LIMIT = 3
ACTIVATIONS = ("relu", "gelu")

class Base(nn.Module):
    slope = 0.1

    def act(self, x):
        return F.leaky_relu(x, self.slope)

class Net(Base):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("shift", torch.zeros(5))
        self.options = {"depth": 2, "names": ["a"]}
        self.table = torch.arange(5.0)
        self.then = scaled(3)

    def forward(self, x):
        x = self.act(self.fc(x)) + self.shift
        for _ in range(self.options["depth"]):
            x = helper(x) if LIMIT > 2 else x
        return self.then(h.helper(self.drop(x)))

def scaled(factor):
    def run(x, *, bias=0):
        return x * factor + bias
    return run

def loss(output, target):
    return F.cross_entropy(output, target)
"""


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """`loaded(old, new)` makes the modules above anew, with `old` replaced by `new`."""

    def load(old: str = "", new: str = "") -> ModuleType:
        assert not old or (HELPERS + NET).count(old) == 1
        for name, text in (("digested_helpers", HELPERS), ("digested_net", NET)):
            module = ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
            exec(
                compile(text.replace(old, new) if old else text, f"{name}.py", "exec", dont_inherit=True), vars(module)
            )
        return module

    return load


def digest(module: Any, net: nn.Module | None = None, *more: object, rows: int = 4) -> str | None:
    images = torch.linspace(0, 1, rows * 4).reshape(rows, 4)
    net = module.Net() if net is None else net
    return code_digest(net, Example.bind(net, images, torch.arange(rows) % 5, module.loss), *more)


def test_the_digest_of_a_model_does_not_depend_on_its_weights_or_the_process(
    loaded: Callable[..., ModuleType], tmp_path: Path
) -> None:
    first, second = digest(loaded()), digest(loaded())
    assert first is not None and first == second
    (tmp_path / "digested_helpers.py").write_text(HELPERS)
    (tmp_path / "digested_net.py").write_text(NET)
    script = """
        import torch, digested_net as n
        from splitc.capture.code_digest import code_digest
        from splitc.capture.example import Example
        net = n.Net()
        images = torch.linspace(0, 1, 16).reshape(4, 4)
        print(code_digest(net, Example.bind(net, images, torch.arange(4) % 5, n.loss)))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == first


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x = self.act(self.fc(x)) + self.shift", "x = self.act(self.fc(x)) - self.shift"),
        ("slope = 0.1", "slope = 0.2"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("SCALE = 2.0", "SCALE = 2.5"),
        ('TABLE = {"a": [1, 2]}', 'TABLE = {"a": [1, 3]}'),
        ("power=2", "power=3"),
        ("math.pi", "math.e"),
        ("self.then = scaled(3)", "self.then = scaled(4)"),
        ("bias=0", "bias=1"),
        ('{"depth": 2, "names": ["a"]}', '{"depth": 3, "names": ["a"]}'),
        ('"names": ["a"]', '"names": ["b"]'),
        ("nn.Dropout(0.1)", "nn.Dropout(0.2)"),
        ("torch.arange(5.0)", "torch.arange(5.0) + 1"),
        ("torch.zeros(5)", "torch.ones(5)"),
        ("nn.Linear(4, 5)", "nn.Linear(4, 5, bias=False)"),
        ("F.cross_entropy(output, target)", "F.cross_entropy(output, target, reduction='sum')"),
        ("F.leaky_relu(x, self.slope)", "F.elu(x, self.slope)"),
    ],
)
def test_a_change_of_one_line_is_another_digest(loaded: Callable[..., ModuleType], old: str, new: str) -> None:
    assert digest(loaded()) != digest(loaded(old, new)) is not None


def test_a_change_of_state_is_another_digest(loaded: Callable[..., ModuleType]) -> None:
    module = loaded()
    before = digest(module)

    def changed(change: Callable[[Any], object]) -> str | None:
        net = module.Net()
        change(net)
        return digest(module, net)

    found = [
        changed(lambda net: net.eval()),
        changed(lambda net: setattr(net, "new", 1)),
        changed(lambda net: net.fc.weight.requires_grad_(False)),
        changed(lambda net: net.register_forward_hook(lambda m, a, out: out * 2)),
        changed(lambda net: net.register_forward_hook(lambda m, a, out: out * 3)),
        changed(lambda net: setattr(net, "forward", lambda x: net.fc(x))),
        changed(lambda net: setattr(net.fc, "extra", Hidden)),
        changed(lambda net: setattr(net.fc, "extra", Row("conv", ("images",)))),
        changed(lambda net: net.double()),
        changed(lambda net: setattr(net, "twin", net.fc)),
        changed(lambda net: setattr(net, "twin", nn.Linear(4, 5))),
        digest(module, None, torch.bfloat16),
        digest(module, rows=5),
    ]
    assert found.count(None) == 0, found.index(None)
    assert len({before, *found}) == len(found) + 1


def test_what_is_patched_in_torch_is_another_digest(
    loaded: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = loaded()
    before = digest(module)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert digest(module) != before
    monkeypatch.undo()
    module = loaded()
    monkeypatch.setattr(F, "dropout", lambda x, *args: x)
    assert digest(module) is None


class Hidden(nn.Module):
    def __init__(self, held: object = None) -> None:
        super().__init__()
        self.fc, self.held = nn.Linear(4, 5), held

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


@pytest.mark.parametrize(
    "held",
    [threading.Lock(), iter([1]), torch.Generator(), (k for k in range(3)), random.Random(1), {object(): 1, sys: 2}],
    ids=["lock", "iterator", "generator of torch", "generator", "random numbers", "module"],
)
def test_state_that_python_does_not_show_has_no_digest(held: object) -> None:
    net = Hidden(held)
    assert code_digest(net, Example.bind(net, torch.randn(3, 4), torch.arange(3), F.cross_entropy)) is None
    assert digest(SimpleNamespace(Net=Hidden, loss=F.cross_entropy)) is not None


class Clock(Hidden):
    def forward(self, x: Tensor) -> Tensor:
        import time

        return self.fc(x) * time.time()


class Lottery(Hidden):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * random.random()


class Evaluated(Hidden):
    def forward(self, x: Tensor) -> Tensor:
        return eval("self.fc(x)")


class ByString(Hidden):
    def forward(self, x: Tensor) -> Tensor:
        return getattr(random, "random")() * self.fc(x)  # noqa: B009


class Loads(Hidden):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + torch.load("bias.pt")


@pytest.mark.parametrize("cls", [Clock, Lottery, Evaluated, ByString, Loads])
def test_code_that_reads_what_is_not_in_it_has_no_digest(cls: type[Hidden]) -> None:
    assert digest(SimpleNamespace(Net=cls, loss=F.cross_entropy)) is None


def test_hooks_on_all_modules_have_no_digest() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, out: None)
    try:
        assert digest(SimpleNamespace(Net=Hidden, loss=F.cross_entropy)) is None
    finally:
        handle.remove()


def test_the_example_counts_by_its_kind_of_data() -> None:
    net = Hidden()

    def of(images: Tensor, labels: Tensor) -> str | None:
        return code_digest(net, Example.bind(net, images, labels, F.cross_entropy))

    floats, labels = torch.randn(6, 4), torch.arange(6) % 5
    mask = (torch.arange(24).reshape(6, 4) % 3 > 0).float()
    found = [
        of(floats, labels),
        of(floats, labels - 1),
        of(floats.abs() + 2, labels),
        of(floats.softmax(1), labels),
        of(mask, labels),
        of(mask * torch.arange(6)[:, None].sign(), labels),
        of(torch.ones(6, 4), labels),
        of(torch.cat([floats[:, :3], mask[:, :1]], 1), labels),
    ]
    assert None not in found and len({*found}) == len(found)
    assert of(torch.randn(6, 4), labels) == found[0]
