"""Read a plan.json, which a person may have edited: everything that is wrong with it is told at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from splitc.errors import LaunchError, bullets
from splitc.names import near_name
from splitc.plan import HOLDINGS, SYNCS, Placement, Plan

_AGAIN = "compile the model again"


def read_plan_file(path: Path) -> Plan:
    """The plan in a file.  Raises LaunchError with every problem, by the names that the file has for things."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read the plan {path}: {error}") from error
    try:
        data = json.loads(text)
    except ValueError as error:
        raise LaunchError(f"{path} is no JSON, it is cut off or was edited wrongly: {error}; {_AGAIN}") from error
    if not isinstance(data, dict) or data.get("schema") != 1:
        schema = data.get("schema") if isinstance(data, dict) else None
        what = "no schema" if schema is None else f"schema {schema!r}"
        raise LaunchError(f"{path} has {what}, this splitc reads plans of schema 1; {_AGAIN}")
    problems = list(_shape(data))
    if not problems:
        problems = list(_sense(data))
    if problems:
        raise LaunchError(bullets(f"{path} is not a plan that can be followed:", problems))
    return Plan.from_json(text)


def _shape(data: dict[str, Any]) -> Iterator[str]:
    """Keys that are missing or unknown, and values of another kind."""
    known = {field.name for field in fields(Plan)}
    for name in ("world", "roles", "placements", "examples", "strategy", "cluster", "candidates", "hash"):
        if name not in data:
            yield f"{name} is missing"
    for name in data.keys() - known - {"schema", "hash"}:
        yield f"{name} is an unknown key; {near_name(name, known)}".rstrip("; ")
    for name in ("roles", "placements", "examples"):
        if not isinstance(data.get(name, {}), dict) or not data.get(name, {"": 0}):
            yield f"{name} must be a table that is not empty"
    if type(data.get("world", 1)) is not int or data.get("world", 1) < 1:
        yield f"world is {data['world']!r}; it must be a whole number of at least 1"


def _sense(data: dict[str, Any]) -> Iterator[str]:
    """Ranks that are not there or have two roles, examples that do not add up, placements in no role."""
    world, roles, examples = data["world"], data["roles"], data["examples"]
    seen: dict[int, str] = {}
    for role, ranks in roles.items():
        if not isinstance(ranks, list) or not ranks or not all(type(rank) is int for rank in ranks):
            yield f"roles: {role} must be a list of ranks"
            continue
        for rank in ranks:
            if not 0 <= rank < world:
                yield f"roles: {role} has rank {rank}, but the world has ranks 0 to {world - 1}"
            if rank in seen:
                yield f"roles: rank {rank} is in {seen[rank]} and in {role}"
            seen[rank] = role
        bounds = examples.get(role)
        if not isinstance(bounds, list) or not all(type(bound) is int for bound in bounds):
            yield f"examples: {role} must be a list of {len(ranks) + 1} bounds"
        elif len(bounds) != len(ranks) + 1 or bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
            yield f"examples: {role} is {bounds}; it must be {len(ranks) + 1} bounds that begin with 0 and grow"
    totals = {role: bounds[-1] for role, bounds in examples.items() if isinstance(bounds, list) and bounds}
    if len(set(map(str, totals.values()))) > 1:
        yield f"examples: the roles differ in the global batch, {totals}"
    yield from _placements(data)


def _placements(data: dict[str, Any]) -> Iterator[str]:
    parts = {field.name for field in fields(Placement)}
    for layer, placement in data["placements"].items():
        if not isinstance(placement, dict) or placement.keys() != parts:
            yield f"placements: {layer} must have {', '.join(sorted(parts))}"
            continue
        for part, known in (("role", tuple(data["roles"])), ("holding", HOLDINGS), ("sync", SYNCS)):
            if placement[part] not in known:
                yield f"placements: {layer} has {part} {placement[part]!r}; there are {', '.join(known)}"
