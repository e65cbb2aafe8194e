"""The names by which generated code calls functions."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from splitc.ir import comm_ops, op_names
from splitc.ir.op_names import function_name, is_nameable


def test_every_name_evaluates_to_the_function_that_it_names() -> None:
    comm = SimpleNamespace(**{function.__name__: function for function in comm_ops.NODES})
    scope = {"F": F, "torch": torch, "operator": operator, "comm": comm}
    wrong = {name for key, name in op_names._NAMES.items() if id(eval(name, scope)) != key}
    assert wrong <= {"torch.manual_seed"}, "which torch.compile wraps when it is first imported"
    assert len(op_names._NAMES) > 1000
    assert all(eval(function_name(node), scope) is node for node in comm_ops.NODES)


def test_functions_of_equal_names_in_two_modules_are_told_apart() -> None:
    assert function_name(F.relu) == "F.relu" and function_name(torch.relu) == "torch.relu"
    assert function_name(comm_ops.dropout) == "comm.dropout"


def test_a_function_of_the_user_has_no_name() -> None:
    assert not is_nameable(lambda x: x) and is_nameable(torch.cat)


def test_internal_functions_of_torch_are_called_by_name_unless_they_draw_or_write() -> None:
    aten = torch.ops.aten
    pure: tuple[Any, ...] = (torch._softmax, torch._weight_norm, torch._grouped_mm, aten.relu, aten.mm.default)
    assert all(is_nameable(function) and eval(function_name(function)) is function for function in pure)
    others: tuple[Any, ...] = (torch._standard_gamma, torch._foreach_add_, aten.bernoulli, aten.relu_)
    assert not any(is_nameable(function) for function in others)
    assert not is_nameable(torch._is_functional_tensor), "which is no operation"
