"""Read a plan.json, which a person may have edited: everything that is wrong with it is told at once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from splitc.errors import LaunchError, bullets
from splitc.ir.names import near_name
from splitc.ir.phases import Phases
from splitc.ir.plan import ALL_REDUCES, HOLDINGS, SCHEMES, SPLITS, SYNCS, UPDATES, Grouping, LayerPlacement, Plan
from splitc.ir.prediction import PREDICTION_KEYS

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
    known = {"examples", *PREDICTION_KEYS, *(each.name for each in fields(Plan))} - {"batch_offsets", "prediction"}
    for name in ("world", "roles", "placements", "examples", "strategy", "cluster", "candidates", "hash"):
        if name not in data:
            yield f"{name} is missing"
    for name in data.keys() - known - {"schema", "hash"}:
        yield f"{name} is an unknown key; {near_name(name, known)}".rstrip("; ")
    for name in ("roles", "placements", "examples"):
        if not isinstance(data.get(name, {}), dict) or not data.get(name, {"": 0}):
            yield f"{name} must be a table that is not empty"
    if not isinstance(data.get("groups", {}), dict):
        yield "groups must be a table: role -> size, scheme, updates"
    if type(data.get("world", 1)) is not int or data.get("world", 1) < 1:
        yield f"world is {data['world']!r}; it must be a whole number of at least 1"
    for name in ("overlap", "synchronised", "exact"):
        if type(data.get(name, True)) is not bool:
            yield f"{name} is {data[name]!r}; it must be true or false"
    if data.get("all_reduce", ALL_REDUCES[0]) not in ALL_REDUCES:
        yield f"all_reduce is {data['all_reduce']!r}; there are {', '.join(ALL_REDUCES)}"
    yield from _predicted(data)


def _predicted(data: dict[str, Any]) -> Iterator[str]:
    parts = [field.name for field in fields(Phases)]
    predicted = data.get("predicted", [])
    if not isinstance(predicted, list):
        yield "predicted must be a list of phases, one for each rank"
        return
    for k, phases in enumerate(predicted):
        if not isinstance(phases, dict) or phases.keys() != set(parts):
            yield f"predicted: number {k} must have {', '.join(parts)}"
        elif any(type(value) not in (int, float) or not 0 <= value < math.inf for value in phases.values()):
            yield f"predicted: number {k} must have numbers of at least 0"
    ranks = [phases.get("rank") for phases in predicted if isinstance(phases, dict)]
    if ranks != list(range(len(predicted))):
        yield f"predicted: it is for ranks {', '.join(map(str, ranks))}; it must be for each rank, in their order"
    if not isinstance(data.get("priced_on", ""), str):
        yield "priced_on must be a text"


def _sense(data: dict[str, Any]) -> Iterator[str]:
    """Ranks that are not there, examples that do not add up, placements in no role."""
    world, roles, examples = data["world"], data["roles"], data["examples"]
    for role, ranks in roles.items():
        if not isinstance(ranks, list) or not ranks or not all(type(rank) is int for rank in ranks):
            yield f"roles: {role} must be a list of ranks"
            continue
        for rank in ranks:
            if not 0 <= rank < world:
                yield f"roles: {role} has rank {rank}, but the world has ranks 0 to {world - 1}"
        if len(set(ranks)) < len(ranks):
            yield f"roles: {role} has a rank twice"
        bounds = examples.get(role)
        if not isinstance(bounds, list) or not all(type(bound) is int for bound in bounds):
            yield f"examples: {role} must be a list of {len(ranks) + 1} bounds"
        elif len(bounds) != len(ranks) + 1 or bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
            yield f"examples: {role} is {bounds}; it must be {len(ranks) + 1} bounds that begin with 0 and grow"
    totals = {role: bounds[-1] for role, bounds in examples.items() if isinstance(bounds, list) and bounds}
    if len(set(map(str, totals.values()))) > 1:
        yield f"examples: the roles differ in the global batch, {totals}"
    if data.get("predicted") and len(data["predicted"]) != world:
        yield f"predicted: it is for {len(data['predicted'])} ranks, not for {world}"
    yield from _groups(data)
    yield from _servers(data)
    yield from _placements(data)


def _groups(data: dict[str, Any]) -> Iterator[str]:
    roles, parts = data["roles"], {field.name for field in fields(Grouping)}
    for role, group in data.get("groups", {}).items():
        if role not in roles:
            yield f"groups: there is no role {role!r}; {near_name(role, roles)}there are {', '.join(roles)}"
            continue
        if not isinstance(group, dict) or "size" not in group or not group.keys() <= parts:
            yield f"groups: {role} must have size, scheme, updates"
            continue
        size, ranks = group["size"], len(roles[role]) if isinstance(roles[role], list) else 0
        if type(size) is not int or size < 1:
            yield f"groups: {role} has size {size!r}; it must be a whole number of at least 1"
        elif ranks % size:
            yield f"groups: {role} has groups of {size}, which do not divide its {ranks} ranks"
        for part, known in (("scheme", SCHEMES), ("updates", UPDATES)):
            if group.get(part, known[-1]) not in known:
                yield f"groups: {role} has {part} {group[part]!r}; there are {', '.join(known)}"
        if size != 1 and role == next(iter(roles)):
            yield f"groups: {role} reads the data, which no group does; let a role before it read"
        if role != (last := next(reversed(roles))) and group.get("scheme") in SCHEMES and group["scheme"] != "BK":
            yield (
                f"groups: {role} has scheme {group['scheme']!r}, but only {last}, with the loss, has several "
                f"microbatches: BK"
            )


def _servers(data: dict[str, Any]) -> Iterator[str]:
    world, servers = data["world"], data.get("servers", [])
    if not isinstance(servers, list) or not all(type(rank) is int for rank in servers):
        yield "servers must be a list of ranks"
        return
    for rank in servers:
        if not 0 <= rank < world:
            yield f"servers: there is no rank {rank}, the world has ranks 0 to {world - 1}"
    if len(set(servers)) < len(servers):
        yield "servers: a rank is there twice"


def _placements(data: dict[str, Any]) -> Iterator[str]:
    known = {field.name for field in fields(LayerPlacement)}
    needed = {"role", "holding", "sync"}
    for layer, placement in data["placements"].items():
        if not isinstance(placement, dict) or not needed <= placement.keys() <= known:
            yield f"placements: {layer} must have {', '.join(sorted(known))}"
            continue
        for part, values in (("role", tuple(data["roles"])), ("holding", HOLDINGS), ("sync", SYNCS)):
            if placement[part] not in values:
                yield f"placements: {layer} has {part} {placement[part]!r}; there are {', '.join(values)}"
        if placement.get("split") not in (None, *SPLITS):
            yield f"placements: {layer} has split {placement['split']!r}; there are {', '.join(SPLITS)}"
        if placement["holding"] == "sharded":
            yield from _sharded(data, layer, placement)
        if placement["sync"] == "parameter_server" and not data.get("servers"):
            yield f"placements: {layer} has sync 'parameter_server', but servers is empty"


def _sharded(data: dict[str, Any], layer: str, placement: dict[str, Any]) -> Iterator[str]:
    """A sharded layer is divided over the groups of its role, of which `group` says the size."""
    role, group = placement["role"], placement.get("group")
    grouping = data.get("groups", {}).get(role)
    if grouping is None:
        yield f"placements: {layer} is sharded, but groups has nothing for its role {role!r}"
    elif group is not None and isinstance(grouping, dict) and group != grouping.get("size"):
        yield f"placements: {layer} has group {group!r}, but the groups of its role have size {grouping.get('size')!r}"
