"""Parameters that several roles use: each role has a copy, whose gradients are summed before identical updates."""

from __future__ import annotations

from splitc.ir.program import PlacedProgram


def tied(program: PlacedProgram) -> dict[str, tuple[int, ...]]:
    """Trainable parameter -> the ranks that hold a copy, for those that layers of more than one role use."""
    plan = program.plan
    users: dict[str, dict[str, None]] = {}
    for layer in program.layers:
        role = plan.placements[layer.name].role
        for name in layer.tensors:
            if program.tensors[name].trainable:
                users.setdefault(name, {})[role] = None
    return {
        name: tuple(sorted({rank for role in roles for rank in plan.roles[role]}))
        for name, roles in users.items()
        if len(roles) > 1
    }


def tied_are_plain(program: PlacedProgram) -> list[str]:
    """Such a parameter is whole on every rank that has it, and its gradient is the business of all its roles."""
    plan = program.plan
    if any(layer.name not in plan.placements for layer in program.layers):
        return []
    found = tied(program)
    return [
        f"{name} is used in several roles, so layer {layer.name} cannot have it {place.holding}, with sync {place.sync}"
        for layer in program.layers
        for name in layer.tensors
        for place in [plan.placements[layer.name]]
        if name in found
        and (place.holding != "replicated" or place.sync not in ("all_reduce", "none") or place.role in plan.groups)
    ]
