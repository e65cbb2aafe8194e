"""Every op that is known has one record."""

from __future__ import annotations

from splitc.ir import torch_ops
from splitc.ir.torch_ops import ops_with


def test_each_name_has_one_record_of_known_traits() -> None:
    records = [line.strip().split(": ") for line in torch_ops._TABLE.strip().splitlines()]
    names = [name for record, _ in records for name in record.split()]
    repeated = {name for name in names if names.count(name) > 1}
    assert torch_ops.__doc__ is not None and repeated == set()
    assert {trait for _, traits in records for trait in traits.split()} <= {
        *torch_ops.__doc__.replace(",", " ").split()
    }


def test_ops_are_found_by_any_of_their_traits() -> None:
    assert ops_with("quotient") == {"div", "divide", "true_divide", "truediv"}
    assert ops_with("quotient", "negation") == ops_with("quotient") | {"neg", "negative"}
