"""Fill in what a plan.json leaves out where the rest of it implies it, so that a person can write one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitc.ir.shares import serve, share_out


def completed(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a plan with its strategy, roles, examples and all parts of its placements.

    One role, `all`, has every rank.  The first role shares a step's examples evenly, and others serve its ranks; where
    none are given, `UsePlan` takes the model's example for each reader.  A placement may be the name of its role alone.
    """
    data = {**data, "roles": data.get("roles") or {"all": list(range(data["world"]))}}
    bounds, roles = data.get("examples") or {}, data["roles"]
    total, readers = next((each[-1] for each in bounds.values() if each), 0), len(next(iter(roles.values())))
    first = tuple(bounds.get(next(iter(roles)), ())) or share_out(total, readers or 1)
    even = {role: list(serve(first, len(ranks))) for role, ranks in roles.items() if total and ranks}
    placements = {name: _placement(place, data) for name, place in data.get("placements", {"*": {}}).items()}
    return {"strategy": "by_hand", **data, "examples": {**even, **bounds}, "placements": placements}


def _placement(place: str | Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    roles, rounds = data["roles"], data.get("rounds")
    given = {"role": place} if isinstance(place, str) else {k: value for k, value in place.items() if value is not None}
    role = given.get("role", next(iter(roles)) if len(roles) == 1 else None)
    size = data.get("groups", {}).get(role, {}).get("size", 1)
    holding = given.get("holding", "sharded" if {"split", "group"} & given.keys() else "replicated")
    together = min(len(roles.get(role, ())), rounds.get("unit", 1) if rounds else data["world"])
    alone = 1 if holding == "replicated" and given.get("state") == "batch" else size
    sync = "all_reduce" if together > alone else "average" if rounds else "none"
    own = {"group": size} if holding == "sharded" and size > 1 else {}
    return {"role": role, "holding": holding, "sync": sync, **own, **given}
