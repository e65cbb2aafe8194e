"""What splitc prints is kept in golden files: program, plan, scripts, report.  A refactor leaves them alone."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.alexnet import alexnet
from examples.mlp import mlp
from examples.resnet import resnet18
from splitc.compiled import CompiledProgram
from splitc.ir.placements import Placement
from splitc.ir.prediction import PREDICTION_KEYS, Prediction
from splitc.ir.printer import print_program
from splitc.ir.program import Program
from splitc.report.text import report
from tests.support.compiled import analyse, class_batch, compiled
from tests.support.sampling import sampled

Golden = Callable[[str, str], None]


@cache
def whole_alexnet() -> tuple[nn.Module, Any, Any, Program]:
    """AlexNet, a batch, its targets, and the captured program."""
    model, (x, y) = alexnet(), class_batch((8, 3, 224, 224), classes=1000)
    return model, x, y, analyse(model, (x,), y, F.cross_entropy)


def separated_alexnet() -> CompiledProgram:
    model, x, y, known = whole_alexnet()
    return compiled(model, (x,), y, F.cross_entropy, 4, "layer_separation(n_c=3, n_f=1)", analysed=known)


def two_fc_ranks() -> CompiledProgram:
    """Unequal shares, a weighted mean over two fc ranks, skip connections and BatchNorm below the cut."""
    x, y = class_batch((4, 3, 32, 32))
    loss = nn.CrossEntropyLoss(ignore_index=0)
    pins = {"fc": "fc", "conv1": "conv", "bn1": "conv", "layer*": "conv"}
    return compiled(resnet18(width=4), (x,), y, loss, 5, "layer_separation(n_c=3, n_f=2)", pins=pins, global_batch=11)


def data_parallel_alexnet() -> CompiledProgram:
    model, x, y, known = whole_alexnet()
    return compiled(model, (x,), y, F.cross_entropy, 2, "data_parallel", analysed=known)


def mixed_alexnet() -> CompiledProgram:
    """Convolutions all-reduced, fc6 sharded in groups of 2, fc7 late-multiplied, fc8 on one rank."""
    x, y = class_batch((4, 3, 64, 64))
    pins = {
        "classifier.1": Placement(holding="sharded", group=2),
        "classifier.4": Placement(sync="late_multiply"),
        "classifier.6": Placement(role="fc"),
    }
    return compiled(alexnet(0.25, 10), (x,), y, F.cross_entropy, 4, "mixed", pins=pins)


def modulo_mlp() -> CompiledProgram:
    """Layers divided by columns and by rows in groups of 2, in turns; a weighted mean."""
    x, y = class_batch((4, 20))
    loss = nn.CrossEntropyLoss(ignore_index=0)
    pins = {"hidden.0": "conv", "hidden.1": Placement(holding="sharded"), "output": Placement(holding="sharded")}
    return compiled(mlp(20, (16, 33), 10), (x,), y, loss, 4, "modulo_shard(mp=2)", pins=pins)


def served_mlp() -> CompiledProgram:
    """Two workers, two servers on ranks of their own."""
    x, y = class_batch((4, 20))
    return compiled(mlp(20, (16, 33), 10), (x,), y, F.cross_entropy, 4, "parameter_server(servers=2)")


PROGRAMS = {
    "alexnet_3_1": separated_alexnet,
    "resnet_3_2": two_fc_ranks,
    "alexnet_dp_2": data_parallel_alexnet,
    "alexnet_mixed_4": mixed_alexnet,
    "mlp_modulo_4": modulo_mlp,
    "mlp_served_2_2": served_mlp,
}


@cache
def made(name: str) -> CompiledProgram:
    """One of the programs, compiled once for all tests that only read it."""
    return PROGRAMS[name]()


def decision(text: str) -> str:
    """The part of a plan.json that decides, without what is predicted."""
    data = {key: value for key, value in json.loads(text).items() if key not in PREDICTION_KEYS}
    return json.dumps(data, indent=1) + "\n"


@sampled("name", PROGRAMS, everyday=["mlp_modulo_4"], whole=True)
def test_the_generated_scripts_the_printed_program_and_the_report_are_as_they_were(name: str, golden: Golden) -> None:
    program = made(name)
    for file, text in program.files.items():
        golden(f"{name}/{file}", decision(text) if file == "plan.json" else text)
        assert file == "plan.json" or max(map(len, text.splitlines())) <= 120
        assert not re.search(r"(?<![\w.:])/\w+/", text), "an absolute path"
    golden(f"{name}/program.txt", print_program(program.program))
    golden(f"{name}/report.txt", report(program.program))
    assert max(map(len, report(program.program).splitlines())) <= 80


def test_compiling_twice_gives_the_same_bytes() -> None:
    first = made("mlp_served_2_2").files
    torch.manual_seed(2)  # other weights and other data: the programs do not depend on them
    assert served_mlp().files == first


@pytest.mark.slow
def test_ranks_of_one_role_differ_only_in_what_is_their_own() -> None:
    files = made("alexnet_3_1").files
    a, b = files["rank0.py"].splitlines(), files["rank1.py"].splitlines()
    differing = [x.split("=")[0].strip() for x, y in zip(a, b, strict=True) if x != y]
    own = ["index", "examples", '"fc": (Route(peer']
    reader = ["examples", "replicas", '"fc": (Route(peer']
    assert differing[0].startswith('"""Rank 0') and differing[1:] == [*own, *reader]


def test_the_hash_of_a_plan_tells_decisions_and_not_prices() -> None:
    plan = made("mlp_modulo_4").plan
    assert dataclasses.replace(plan, prediction=Prediction()).hash == plan.hash
    other = dict.fromkeys(plan.batch_offsets, (0, 3, 8, 12, 16))
    assert dataclasses.replace(plan, batch_offsets=other).hash != plan.hash
    assert json.loads(plan.to_json())["hash"] == plan.hash
