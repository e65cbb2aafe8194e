"""Which parameters servers can hold, and which rows each one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.ir.server_rows import pieces, pushable, read_by
from tests.support.capturing import capture, node
from tests.support.models import made
from tests.support.pair import analysed_pair


def test_the_bytes_of_a_bucket_are_cut_into_equal_ranges_of_whole_rows() -> None:
    program = analysed_pair()  # b.bias: 5 rows of 4 bytes, b.weight: 5 rows of 24 bytes
    found = [(p.name, p.server, p.first, p.last) for p in pieces(program, ("b.bias", "b.weight"), (7, 8))]
    assert found == [("b.bias", 7, 0, 5), ("b.weight", 7, 0, 2), ("b.weight", 8, 2, 5)]


def test_more_servers_than_rows_leave_some_without() -> None:
    held = pieces(analysed_pair(), ("b.bias",), range(9))
    assert [p.last - p.first for p in held] == [1] * 5 and sum(p.nbytes for p in held) == 20


MODELS: dict[str, tuple[Callable[[Any, Tensor], Tensor], set[str]]] = {
    "all": (lambda m, x: m.b(m.a(x)), {"a.weight", "a.bias", "b.weight", "b.bias"}),
    "without gradient": (lambda m, x: m.b(m.a(x).detach()), {"b.weight", "b.bias"}),
    "unused by the loss": (lambda m, x: m.b(x) + 0 * m.a(x).detach(), {"b.weight", "b.bias"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_only_parameters_that_the_loss_reaches_can_be_pushed(name: str) -> None:
    run, reached = MODELS[name]
    program = capture(
        made(run, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), (torch.randn(3, 4),), torch.randn(3, 4), F.mse_loss
    )
    assert pushable(program) == reached


def test_frozen_parameters_stay_with_the_workers() -> None:
    model = made(lambda m, x: m.b(m.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.get_parameter("b.weight").requires_grad_(False)
    program = capture(model, (torch.randn(3, 4),), torch.randn(3, 4), F.mse_loss)
    assert pushable(program) == {"a.weight", "a.bias", "b.bias"}
    assert read_by(program, node(program, "b")) == {"b.weight", "b.bias"}
