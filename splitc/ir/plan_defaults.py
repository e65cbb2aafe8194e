"""Read the decisions of a plan.json, and fill in what the rest of it implies, so that a person can write one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from splitc.features import parts
from splitc.ir.decode import Problem, decode
from splitc.ir.placements import LayerPlacement, Placement
from splitc.ir.prediction import PREDICTION_KEYS
from splitc.ir.shares import serve, share_out

KEYS = {"batch_offsets": "examples"}
"""Fields of a plan that have another name in plan.json."""


def read_decision(hints: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The fields of a plan that decide, of the data of a plan.json, and what is wrong with them.  hints: of its fields.

    A placement that cannot be read leaves out its layer, any other value its whole key.
    """
    by_key = {KEYS.get(name, name): hint for name, hint in hints.items() if name not in ("prediction", "part_of")}
    by_key["placements"] = Mapping[str, Placement | str]
    own = {key: value for key, value in data.items() if key not in ("schema", "hash", *PREDICTION_KEYS)}
    needed = ("world", "roles") if "placements" in own else ("world",)
    values, problems = decode(dict(sorted(by_key.items())), own, needed)
    unsound = {problem.path[0] for problem in problems if problem.path[0] != "placements"}
    return completed({key: value for key, value in values.items() if key not in unsound}), problems


def completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan, of those that a plan.json gives.

    One role, `all`, has every rank.  The first role shares a step's examples evenly, and others serve its ranks; where
    none are given, `UsePlan` takes the model's example for each reader.  A placement may be the name of its role alone.
    """
    fields = {"strategy": "by_hand", "world": 1, "placements": {"*": Placement()}, **given}
    roles = fields["roles"] = given.get("roles") or {"all": tuple(range(fields["world"]))}
    bounds = fields.pop("examples", {})
    total, readers = next((each[-1] for each in bounds.values() if each), 0), len(next(iter(roles.values())))
    first = bounds.get(next(iter(roles))) or share_out(total, readers or 1)
    even = {role: tuple(serve(first, len(ranks))) for role, ranks in roles.items() if total and ranks}
    placement = cache(lambda place: _placement(place, fields))  # of which many layers have the same
    fields["placements"] = {name: placement(place) for name, place in fields["placements"].items()}
    return {**fields, "batch_offsets": {**even, **bounds}}


def _placement(place: str | Placement, fields: Mapping[str, Any]) -> LayerPlacement:
    roles, groups = fields["roles"], fields.get("groups", {})
    implied = (part.synchronised(fields) for part in parts("splitc.ir", "defaults"))
    unit, otherwise = next(filter(None, implied), (fields["world"], "none"))
    place = Placement(role=place) if isinstance(place, str) else place
    role = place.role or (next(iter(roles)) if len(roles) == 1 else None)
    size = groups[role].size if role in groups else 1
    holding = place.holding or ("sharded" if place.split or place.group else "replicated")
    together = sum(rank < unit for rank in roles.get(role, ()))
    alone = 1 if holding == "replicated" and place.state == "batch" else size
    sync = "all_reduce" if together > alone else otherwise
    group = size if holding == "sharded" and size > 1 else None
    usual = {"role": role, "holding": holding, "sync": sync, "group": group}
    return LayerPlacement(**{**usual, **{part: value for part, value in asdict(place).items() if value is not None}})
