"""What the planner asks of a way to sum the gradients of a layer; a strategy of its name says what is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import ClassVar

from splitc.ir.layers import Layer
from splitc.ir.linears import sparse_tables
from splitc.ir.placements import SYNCS
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from splitc.passes.planner.divisions import Division
from splitc.passes.planner.pins import Pin
from splitc.passes.planner.problem import Option
from splitc.passes.planner.registry import STRATEGIES
from splitc.passes.planner.request import Request

Memory = Callable[[float], float]
"""Bytes of a layer on a rank with these more."""


class Sync:
    """A way to sum gradients, as an all-reduce is; `SYNC` in the file of a strategy of the same name is its own.

    how: of a layer that has it.  instead: what travels in place of the gradient.
    """

    how: ClassVar[str] = ""
    instead: ClassVar[str] = ""

    def work(self, ranks: int) -> float:
        """Compute of a layer on a rank, as a multiple of that with an all-reduce."""
        return 1.0

    def options(self, request: Request, division: Division, role: int, layer: str, memory: Memory) -> Iterator[Option]:
        """Yield the ways to run a layer so in a role without groups."""
        return iter(())

    def unmet(self, request: Request, layer: str, pin: Pin, size: int | None) -> Iterator[str]:
        """Yield why a pin cannot ask for it, of this layer in groups of `size` ranks; `...` stands for the layer."""
        return iter(())

    def misfits(self, program: Program, plan: Plan, layer: Layer) -> Iterator[str]:
        """Yield why a layer of a plan cannot have it."""
        return iter(())


def sync_named(name: str | None) -> Sync:
    """The sync of a placement, a pin or an option."""
    found: Sync = getattr(import_module(f"splitc.strategies.{name}"), "SYNC", _PLAIN) if name in STRATEGIES else _PLAIN
    return found


def syncs() -> list[Sync]:
    """All of them."""
    return [sync_named(name) for name in SYNCS]


def sync_misfits(program: Program, plan: Plan) -> Iterator[str]:
    """Yield the layers of a plan that cannot have their sync."""
    tables = sparse_tables(program)
    for layer in program.layers:
        place = plan.placements[layer.name]
        if any(program.tensors[name].trainable for name in layer.tensors):
            yield from sync_named(place.sync).misfits(program, plan, layer)
        if place.sync == "late_multiply" or not (shared := tables.intersection(layer.tensors)):
            continue
        roles = {plan.placements[each.name].role for each in program.layers if not shared.isdisjoint(each.tensors)}
        if len(roles) > 1 or any(len(plan.roles[role]) > 1 for role in roles):
            yield f"placements: {layer.name} has sync {place.sync!r}, but sparse gradients: take 'late_multiply'"


_PLAIN = Sync()
