"""Any name of a layer, an input, a model or a cluster gives a program that trains; no text of theirs is run."""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.ir.names import is_attribute, is_ours, is_role, prose, quoted
from splitc.ir.program import Program
from tests.support.compiled import analyse, compiled
from tests.support.sampling import in_tiers, sampled

BOMB = "raise_(SystemExit)"
TEXTS = [
    f'"""\n{BOMB}\n"""',
    f"'''\n{BOMB}\n'''",
    f'\\"""\n{BOMB}\n"""',
    f'"\n{BOMB}\n"',
    f'")\n{BOMB}\n("',
    f"\n{BOMB}",
    f"\r{BOMB}",
    f'x\\\n"""; {BOMB}; """',
    f"{{{BOMB}}}",
    "%s %d {} {0} {world}",
    'ends with a quote"',
    "ends with a backslash\\",
    "nul \0, bell \a, escape \x1b[31m, separator \u2028, right to left \u202e",
    '""""""""',
    "",
]
NAMES = [
    *('a"b', "a'b", "a\\", "a\nb", "a\rb", "a\0b", "a\u2028b", f'")\n{BOMB}\n("', 'a["b', "a(b", "a, b", "a#b", " "),
    *(
        "None",
        "True",
        "class",
        "import",
        "match",
        "__x",
        "__x__",
        "ﬁ",
        "K",
        "é",
        "😀",
        "0a",
        "{0}",
        "%s",
        "self",
        "comm",
    ),
    *("F", "nn", "torch", "BUCKETS", "print", "forward_trunk", "forward_head", "a" * 150, 'a"' * 60),
]


class Hostile(nn.Module):
    """Layers, parameters, buffers and keys of these names, in the model itself and in modules inside it."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        torch.manual_seed(1)
        for name in names:
            inner = nn.Module()
            self.add_module(name, nn.Linear(4, 4))
            self.add_module(f"{name}i", inner)
            for owner in (self, inner):
                owner.register_parameter(f"{name}p", nn.Parameter(torch.randn(4)))
                owner.register_buffer(f"{name}b", torch.randn(4))
            inner.add_module(name, nn.Linear(4, 4))
        self.keyed = nn.ParameterDict({name: nn.Parameter(torch.randn(4)) for name in names})
        self.tied = nn.Module()
        for name in names[:3]:
            self.tied.register_parameter(name, self.keyed[name])

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            inner = self._modules[f"{name}i"]
            assert inner is not None
            for owner in (self, inner):
                layer = owner._modules[name]
                assert layer is not None
                x = torch.tanh(layer(x) * owner._parameters[f"{name}p"] + owner._buffers[f"{name}b"])
            x = x + self.keyed[name]
        for name in self.names[:3]:
            x = x * self.tied.get_parameter(name)
        return x


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4, dtype=dtype), torch.randint(4, (4,))


@cache
def analysed(part: int) -> tuple[nn.Module, Program]:
    model = Hostile(NAMES[part::4]).double()
    return model, analyse(model, *batch(), F.cross_entropy)


STRATEGIES = ("modulo_shard(mp=2)", "parameter_server(servers=2,beside=True)", "data_parallel", "single_device")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "part"), list(zip(STRATEGIES, range(4), strict=True)))
def test_layers_and_keys_of_any_name_train(strategy: str, part: int) -> None:
    model, known = analysed(part)
    assert compiled(model, *batch(), F.cross_entropy, 2, strategy, analysed=known).verify(steps=1).holds


# -- inputs ------------------------------------------------------------------------------------------------------------

INPUTS = [
    *(("conv", "fc"), ("trunk", "head"), ("comm", "stage"), ("loss", "total"), ("losses", "nn"), ("cut0", "cut1")),
    *(("x", "x_head"), ("x", "x_group"), ("d_cut0", "cut0_slice"), ("_", "__"), ("sum", "getattr"), ("torch", "F")),
    *(("TRUNK_BUCKETS", "SERVED"), ("operator", "float"), ("match", "é"), ("conv", "conv_")),
]


def two_inputs(first: str, second: str) -> nn.Module:
    """A model whose forward has parameters of these names."""
    source = f"def forward(self, {first}, {second}): return self.join(self.left({first}).tanh() * self.right({second}))"
    scope: dict[str, Any] = {}
    exec(source, scope)
    model = type("Net", (nn.Module,), {"forward": scope["forward"]})()
    model.left, model.right, model.join = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)
    return model.double()


@pytest.mark.slow
@sampled("names", INPUTS, one_in=len(INPUTS), ids=" ".join)
def test_inputs_of_any_name_train(names: tuple[str, str]) -> None:
    model, (x, y) = two_inputs(*names), batch()
    known = analyse(model, (x, x.flip(0)), y, F.cross_entropy)
    for strategy in ("modulo_shard(mp=2)", "layer_separation(n_c=1, n_f=1)"):
        pins = {"left": "trunk", "right": "fc", "join": "fc"} if strategy.startswith("layer") else {}
        program = compiled(model, (x, x.flip(0)), y, F.cross_entropy, 2, strategy, analysed=known, pins=pins)
        assert program.verify(steps=1).holds, strategy


# -- texts -------------------------------------------------------------------------------------------------------------


@cache
def plain() -> tuple[nn.Module, Program]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    return model, analyse(model, *batch(torch.float32), F.cross_entropy)


@cache
def files(text: str, strategy: str = "modulo_shard(mp=2)", world: int = 2) -> dict[str, str]:
    """What is generated when model, cluster, strategy and source lines have this text for a name."""
    model, known = plain()
    for node in known.graph.nodes:
        node.meta["info"] = dataclasses.replace(node.meta["info"], source=text or "s")
    known = dataclasses.replace(known, name=text)
    program: CompiledProgram = compiled(model, *batch(torch.float32), F.cross_entropy, world, strategy, analysed=known)
    prediction = dataclasses.replace(program.plan.prediction, cluster=text)
    plan = dataclasses.replace(program.plan, strategy=text, prediction=prediction)
    program.program = dataclasses.replace(program.program, plan=plan)
    return program.files


def shape(text: str) -> list[str]:
    """The kinds of the nodes of a file's syntax tree, in their order."""
    return [type(node).__name__ for node in ast.walk(ast.parse(text))]


OF_TEXTS = list(zip(TEXTS, cycle(["modulo_shard(mp=2)", "parameter_server(servers=1)", "single_device"])))


@in_tiers("cases", OF_TEXTS, one_in=16)
def test_no_text_changes_the_code_that_stands_around_it(cases: list[Any]) -> None:
    for text, strategy in cases:
        usual, hostile = files("Net", strategy), files(text, strategy)
        assert usual.keys() == hostile.keys()
        for name in usual:
            if name.endswith(".py"):
                assert shape(hostile[name]) == shape(usual[name]), name
                assert BOMB not in [line.strip() for line in hostile[name].splitlines()]


def test_a_literal_is_the_text_and_prose_stays_inside_its_docstring() -> None:
    for text in (*TEXTS, *NAMES):
        assert ast.literal_eval(quoted(text)) == text
        (statement,) = ast.parse(f'"""A title {prose(text)}.\n\n{prose(text)}\n"""').body
        assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


# -- rules -------------------------------------------------------------------------------------------------------------


def test_names_of_roles() -> None:
    assert all(is_role(name, ("trunk", "stage3")) for name in ("trunk", "stage3", "stage12", "my_role", "b2"))
    assert not any(is_role(name, ("trunk", "stage3")) for name in NO_ROLES)


NO_ROLES: list[object] = [
    *("", "A", "a-b", "../x", "a/b", "a b", "é", "0a", "_a", "a\n", "class", "None", "launch", "rank0", "served"),
    *("json", "os", "torch", "splitc", "plan", "idle", "loss", "stage", "comm", "cut0", "a__b", 3, None),
]


def test_a_name_with_an_underscore_at_its_end_is_nobodys() -> None:
    for name in ("conv", "x_group", "loss", "cut12", "a_BUCKETS", "_", "x_stage3"):
        assert is_ours(name) and not is_ours(f"{name}_")


def test_attributes_that_a_class_would_read_differently() -> None:
    assert is_attribute("layer1") and is_attribute("_x") and is_attribute("é")
    assert not any(map(is_attribute, ["__x", "None", "ﬁ", "0", "a b", ""]))
