"""Read a plan.json, which a person may have edited or written."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from os.path import isdir
from pathlib import Path
from typing import Any

from splitc.errors import LaunchError, bullets
from splitc.ir.plan import Plan
from splitc.ir.plan_checks import plan_problems
from splitc.ir.prediction import Prediction

_AGAIN = "mend it, or compile the model again"


def read_plan_file(path: Path, world: int | str | None = None) -> Plan:
    """The plan in a file, or in a build; without prediction where the file was edited since it was priced.

    world: the one that an option asks for.  Raises LaunchError with every problem, by the names that the file has.
    """
    path = path / "plan.json" if isdir(path) else path
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read the plan {path}: {error}") from error
    try:
        data = json.loads(text, object_pairs_hook=_table)
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"{path} is no JSON, it is cut off or was edited wrongly: {error}; {_AGAIN}") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if type(schema) is not int or schema != 1:
        what = 'no "schema": 1' if schema is None else f"schema {schema!r}"
        raise LaunchError(f"{path} has {what}, this splitc reads plans of schema 1; {_AGAIN}")
    if problems := plan_problems(data):
        raise LaunchError(bullets(f"{path} is not a plan that can be followed:", problems))
    plan = Plan.from_json(text)
    if world and str(world) != str(plan.world):
        raise LaunchError(f"{path} is a plan for {plan.world} ranks, not for --world {world}; leave --world out")
    return plan if data.get("hash") == plan.hash else replace(plan, prediction=Prediction(proof="heuristic"))


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := [key for key, number in Counter(key for key, _ in pairs).items() if number > 1]:
        raise ValueError(f"{', '.join(map(repr, twice))} is there twice in one table")
    return dict(pairs)
