"""Read a plan.json, which a person may have edited."""

from __future__ import annotations

import json
from pathlib import Path

from splitc.errors import LaunchError, bullets
from splitc.ir.plan import Plan
from splitc.ir.plan_checks import plan_problems

_AGAIN = "compile the model again"


def read_plan_file(path: Path) -> Plan:
    """The plan in a file.  Raises LaunchError with every problem, by the names that the file has for things."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read the plan {path}: {error}") from error
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"{path} is no JSON, it is cut off or was edited wrongly: {error}; {_AGAIN}") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if type(schema) is not int or schema != 1:
        what = "no schema" if schema is None else f"schema {schema!r}"
        raise LaunchError(f"{path} has {what}, this splitc reads plans of schema 1; {_AGAIN}")
    if problems := plan_problems(data):
        raise LaunchError(bullets(f"{path} is not a plan that can be followed:", problems))
    return Plan.from_json(text)
