"""Check the data of a plan.json, which a person may have edited: everything that is wrong with it is told at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from splitc.ir import placements as known
from splitc.ir.names import is_role, near_name
from splitc.ir.plan import Plan
from splitc.ir.plan_defaults import completed
from splitc.ir.prediction import KEYS, PREDICTION_KEYS, Prediction
from splitc.ir.roles import ROLES
from splitc.ir.rounds import rounds_problems
from splitc.runtime.spec import Rounds

_TYPES = {str: "a text", int: "a whole number", float: "a finite number", bool: "true or false"}
_KEYS = {"batch_offsets": "examples", **KEYS}
_MOST_RANKS, _MOST_EXAMPLES = 100_000, 2**40


def plan_problems(data: dict[str, Any]) -> list[str]:
    """A line for everything that is wrong with a plan, by the names that plan.json has for things.

    What reads a value that is of no use by itself is not checked.
    """
    wrong = [*_unreadable(data)]
    layers = {path[1] for path, _ in wrong if path[0] == "placements" and path[1:]}
    bad = {path[0] for path, _ in wrong if path[0] != "placements" or not path[1:]}
    sound = {key: value for key, value in data.items() if key not in bad}
    if "placements" in sound:
        sound["placements"] = {name: place for name, place in sound["placements"].items() if name not in layers}
    return [*(f"{': '.join(path)} {what}" for path, what in wrong), *_sense(completed({"world": 1, **sound}), bad)]


def decision_problems(plan: Plan) -> list[str]:
    """A line for everything that makes no sense in what a plan decides."""
    return [*_sense(json.loads(json.dumps(plan.decision)), set())]


def _unreadable(data: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Keys that are missing or unknown, and values of another type than their field: keys to it, and what is wrong."""
    keys = {"examples", *(each.name for each in fields(Plan))} - {"batch_offsets", "prediction", "part_of"}
    for name in data.keys() - keys - {"schema", "hash", *PREDICTION_KEYS}:
        yield (name,), f"is an unknown key; {near_name(name, keys)}there are {', '.join(sorted(keys))}"
    if type(data.get("world", 0)) is int and not 1 <= data.get("world", 0) <= _MOST_RANKS:
        yield ("world",), f"is {data.get('world', 'missing')}; it must be at least 1 and at most {_MOST_RANKS} ranks"
    if data.get("roles", None if "placements" in data else True) in (None, {}):
        yield ("roles",), 'is missing; give the ranks of each role, as {"trunk": [0, 1], "head": [2]}'
    hints = get_type_hints(Plan) | {"placements": Mapping[str, known.Placement | str]} | get_type_hints(Prediction)
    for name, hint in hints.items():
        if (key := _KEYS.get(name, name)) in data:
            yield from _mistyped(data[key], hint, key)


def _mistyped(value: Any, hint: Any, *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is not of the type `hint` in a value of JSON; tuples are lists there, dataclasses and mappings tables."""
    kind, parts = get_origin(hint), get_args(hint)
    if is_dataclass(hint) and isinstance(value, dict):
        hints = get_type_hints(hint)
        for name in value.keys() - hints.keys():
            yield (*path, name), f"is an unknown key; {near_name(name, hints)}there are {', '.join(hints)}"
        for name, each in hints.items():
            if name in value:
                yield from _mistyped(value[name], each, *path, name)
        for each in fields(hint):
            if each.name not in value and each.default is each.default_factory is MISSING:
                yield (*path, each.name), "is missing"
    elif kind is tuple and isinstance(value, list):
        for k, each in enumerate(value):
            yield from _mistyped(each, parts[0], *path, f"number {k}")
    elif kind is Mapping and isinstance(value, dict):
        for key, each in value.items():
            yield from _mistyped(each, parts[1], *path, key)
    elif kind is UnionType:
        yield from _mistyped(value, type(value) if type(value) in parts else parts[0], *path)
    elif type(value) is not hint and not (hint is float and type(value) is int):
        table = f"a table of {', '.join(get_type_hints(hint))}" if is_dataclass(hint) else "a table"
        yield path, f"is {value!r:.60}; it must be {_TYPES.get(hint) or ('a list' if kind is tuple else table)}"
    elif hint is float and not abs(value) <= sys.float_info.max:
        yield path, f"is {value!r}; it must be {_TYPES[float]}"


def _sense(data: dict[str, Any], bad: set[str]) -> Iterator[str]:
    """Values that contradict each other.  bad: keys that cannot be read."""
    for section, needs in _SECTIONS.items():
        if bad.isdisjoint(needs.split()):
            yield from section(data)


def _roles(data: dict[str, Any]) -> Iterator[str]:
    world, roles, predicted = data["world"], data["roles"], data.get("predicted", [])
    for role, ranks in roles.items():
        if not is_role(role, ROLES) or any(role.startswith(f"{other}_") for other in roles):
            yield f"roles: {role!r} cannot name a file and a variable: take small letters, and no name that is in use"
        if not ranks:
            yield f"roles: {role} must be a list of ranks"
        for rank in ranks:
            if not 0 <= rank < world:
                yield f"roles: {role} has rank {rank}, but the world has ranks 0 to {world - 1}"
        if len(set(ranks)) < len(ranks):
            yield f"roles: {role} has a rank twice"
        elif sorted(ranks) != ranks:
            yield f"roles: {role} is {ranks}; ranks must stand in their order"
    if any(min(phases.values()) < 0 for phases in predicted):
        yield "predicted: all numbers must be at least 0"
    if predicted and [phases["rank"] for phases in predicted] != list(range(world)):
        yield f"predicted: it must be for each rank of a world of {world}, in their order"


def _examples(data: dict[str, Any]) -> Iterator[str]:
    roles, examples = data["roles"], data["examples"]
    if examples and examples.keys() != roles.keys():
        yield f"examples: it is for {', '.join(examples)}, and the roles are {', '.join(roles)}"
    for role, ranks in roles.items() if examples else ():
        bounds = examples.get(role, [])
        if len(bounds) != len(ranks) + 1 or bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
            yield f"examples: {role} is {bounds}; by roles it must be {len(ranks) + 1} bounds that grow from 0"
        elif bounds[-1] > _MOST_EXAMPLES:
            yield f"examples: {role} has {bounds[-1]} examples in a step; take at most {_MOST_EXAMPLES}"
    totals = {role: bounds[-1] for role, bounds in examples.items() if bounds}
    if len(set(map(str, totals.values()))) > 1:
        yield f"examples: the roles differ in the global batch, {totals}"


def _rounds(data: dict[str, Any]) -> Iterator[str]:
    rounds, world = data.get("rounds"), data["world"]
    if rounds is None:
        return
    yield from (f"rounds: {problem}" for problem in rounds_problems(Rounds(**rounds)))
    unit = rounds.get("unit", 1)
    if unit < 1 or world % unit:
        yield f"rounds: units of {unit} ranks do not divide a world of {world}"
    elif any(group["size"] and unit % group["size"] for group in data.get("groups", {}).values()):
        yield f"rounds: units of {unit} ranks are divided by groups; give them the size of a group, or more"
    if short := [role for role, ranks in data["roles"].items() if len(ranks) < world]:
        yield f"rounds: role {short[0]} is not on all ranks, but each unit trains the whole model"
    if data.get("synchronised") and unit == 1:
        yield "rounds: synchronised is true, but in units of 1 rank there is no other to normalise with"
    deals = any(place["holding"] == "subnet" for place in data["placements"].values())
    if deals and Rounds(**rounds) != Rounds(rounds["steps"]):
        yield "rounds: subnets have no outer optimizer, fragments or server; give no more than steps"
    if data.get("servers"):
        yield "rounds: servers sum gradients in every step; leave rounds or servers out"


def _groups(data: dict[str, Any]) -> Iterator[str]:
    roles = data["roles"]
    for role, group in data.get("groups", {}).items():
        if role not in roles:
            yield f"groups: there is no role {role!r}; {near_name(role, roles)}there are {', '.join(roles)}"
            continue
        size, ranks = group["size"], len(roles[role])
        if size < 1:
            yield f"groups: {role} has size {size!r}; it must be a whole number of at least 1"
        elif ranks % size:
            yield f"groups: {role} has groups of {size}, which do not divide its {ranks} ranks"
        for part, words in (("scheme", known.SCHEMES), ("updates", known.UPDATES)):
            if group.get(part, words[-1]) not in words:
                yield f"groups: {role} has {part} {group[part]!r}; there are {', '.join(words)}"
        if size != 1 and role == next(iter(roles)):
            yield f"groups: {role} reads the data, which no group does; let a role before it read"
        if role != (last := next(reversed(roles))) and group.get("scheme") in known.SCHEMES and group["scheme"] != "BK":
            yield (
                f"groups: {role} has scheme {group['scheme']!r}, but only {last}, with the loss, has several "
                f"microbatches: BK"
            )


def _microbatches(data: dict[str, Any]) -> Iterator[str]:
    number, why = data.get("microbatches", 1), f"microbatches is {data.get('microbatches', 1)}"
    for name, words in (("all_reduce", known.ALL_REDUCES), ("schedule", known.SCHEDULES)):
        if (given := data.get(name, words[0])) not in words:
            yield f"{name} is {given!r}; {near_name(given, words)}there are {', '.join(words)}"
    if number < 1:
        yield f"{why}; it must be at least 1"
    if number <= 1:
        return
    reader = next(iter(data["roles"]))
    smallest = min((b - a for a, b in pairwise(data["examples"].get(reader, []))), default=number)
    if number > smallest:
        yield f"{why}, but a rank of {reader} reads {smallest} examples: take at most {smallest}"
    for role, group in data.get("groups", {}).items():
        if (scheme := group.get("scheme", "B/K")) != "BK" and group["size"] > 1:
            yield f"{why}, but groups: {role} has microbatches of its own, by scheme {scheme!r}: take BK"
        if group.get("updates") == "every":
            yield f"{why}, but groups: {role} updates in every microbatch: take 'once'"
    if data.get("rounds"):
        yield f"{why}, but units of a round run their batches whole: take 1"
    if data.get("synchronised"):
        yield f"{why}, but synchronised BatchNorm normalises over the whole global batch at once: take 1"


def _accumulate(data: dict[str, Any]) -> Iterator[str]:
    if (number := data.get("accumulate", 1)) < 1:
        yield f"accumulate is {number}; it must be at least 1"
    for role, group in data.get("groups", {}).items():
        if number > 1 and group.get("updates") == "every":
            yield f"accumulate is {number}, but groups: {role} updates in every microbatch: take 'once'"


def _servers(data: dict[str, Any]) -> Iterator[str]:
    world, servers = data["world"], data.get("servers", [])
    for rank in servers:
        if not 0 <= rank < world:
            yield f"servers: there is no rank {rank}, the world has ranks 0 to {world - 1}"
    if len(set(servers)) < len(servers):
        yield "servers: a rank is there twice"
    for layer, placement in data["placements"].items():
        for sync, needs, missing in (("parameter_server", "servers", "empty"), ("average", "rounds", "not there")):
            if placement["sync"] == sync and not data.get(needs):
                yield f"placements: {layer} has sync {sync!r}, but {needs} is {missing}"


def _placements(data: dict[str, Any]) -> Iterator[str]:
    for layer, placement in data["placements"].items():
        needed = {"role": tuple(data["roles"]), "holding": known.HOLDINGS, "sync": known.SYNCS}
        for part, values in (needed | {"split": known.SPLITS, "state": known.STATES, "arrives": known.STATES}).items():
            if (given := placement.get(part)) not in values and (given is not None or part in needed):
                what = f"{part} {given!r}; {near_name(given, values)}" if given is not None else f"no {part}; "
                yield f"placements: {layer} has {what}there are {', '.join(values)}"
        if placement.get("arrives") is not None and placement["role"] not in data.get("groups", {}):
            yield f"placements: {layer} has arrives, but its role {placement['role']!r} has no groups"
        if placement.get("state") is not None:
            yield from _state(data, layer, placement)
        if placement["holding"] == "subnet":
            yield from _subnet(data, layer, placement)
        if placement.get("group") is not None and placement["group"] < 1:
            yield f"placements: {layer} has group {placement['group']}; it must be at least 1"
        if placement["holding"] == "sharded":
            yield from _sharded(data, layer, placement)


def _subnet(data: dict[str, Any], layer: str, placement: dict[str, Any]) -> Iterator[str]:
    """Subnets are trained by one rank each, in rounds, and are all in one role."""
    rounds = data.get("rounds")
    if rounds is None or rounds.get("unit", 1) != 1:
        yield f"placements: {layer} has holding 'subnet', which is trained in rounds by units of one rank"
    if placement.get("split") is None:
        yield f"placements: {layer} has holding 'subnet' and needs a split: columns if its outputs are dealt, or rows"
    others = {place["role"] for place in data["placements"].values() if place["holding"] == "subnet"}
    if len(others) > 1:
        yield f"placements: subnets are in roles {', '.join(sorted(others))}; they must be in one"


def _state(data: dict[str, Any], layer: str, placement: dict[str, Any]) -> Iterator[str]:
    """A layer that says how the ranks of its group hold its result is in groups, and can make it so."""
    state = placement["state"]
    if placement["role"] not in data.get("groups", {}):
        yield f"placements: {layer} has state {state!r}, but its role {placement['role']!r} has no groups"
    if state == "features" and placement["holding"] != "sharded":
        yield f"placements: {layer} has state 'features', but it is {placement['holding']}; it must be sharded"
    if state == "batch" and placement["sync"] not in ("all_reduce", "none"):
        yield f"placements: {layer} has state 'batch' with sync {placement['sync']!r}; take all_reduce"


def _sharded(data: dict[str, Any], layer: str, placement: dict[str, Any]) -> Iterator[str]:
    """A sharded layer is divided over the groups of its role, of which `group` says the size."""
    role, group = placement["role"], placement.get("group")
    grouping = data.get("groups", {}).get(role)
    if grouping is None:
        yield f"placements: {layer} is sharded, but groups has nothing for its role {role!r}: give it a size"
    elif group is not None and group != grouping.get("size"):
        yield f"placements: {layer} has group {group!r}, but the groups of its role have size {grouping.get('size')!r}"


_SECTIONS = {
    _roles: "world roles predicted",
    _examples: "roles examples",
    _groups: "roles groups",
    _microbatches: "roles examples groups rounds synchronised microbatches schedule all_reduce",
    _accumulate: "groups accumulate",
    _rounds: "world roles groups rounds synchronised servers placements",
    _servers: "world servers rounds placements",
    _placements: "roles groups rounds placements",
}
"""What is checked -> the keys that it reads."""
