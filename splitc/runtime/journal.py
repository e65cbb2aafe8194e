"""The journal of trainings: what the steps of a build took, as lines of JSON in the cache folder of splitc.

The compiler reads it (`cost_models/calibration/record.py`) and fits the prices of the cluster that the build was priced
on, which its plan.json knows by the digest of its numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LONGEST = 100_000  # bytes, above which a journal begins anew


def cache_folder() -> Path:
    """Where measurements and analyses are kept."""
    moved = os.environ.get("SPLITC_CACHE", "")
    if moved not in ("", "off"):
        return Path(moved)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitc"


def journal(folder: Path, base: str) -> Path:
    """Where the trainings on a cluster are, by the digest of its numbers."""
    return folder / "records" / f"{base}.jsonl"


def note(plan: Mapping[str, Any], seconds: float, name: str = "") -> None:
    """Add a training to the journal, unless nothing may be kept.  plan: of plan.json.  seconds: of a step."""
    told = plan.get("predicted") or ()
    if os.environ.get("SPLITC_CACHE") == "off" or not told or not plan.get("based_on"):
        return
    line = {key: plan[key] for key in ("strategy", "world", "based_on", "factors", "weights") if key in plan}
    line |= {"plan": plan.get("hash", ""), "name": name, "steps": [seconds]}
    line["predicted"] = max(phases["step"] for phases in told)
    path = journal(cache_folder(), plan["based_on"])
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        long = path.exists() and path.stat().st_size > _LONGEST
        with path.open("w" if long else "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")  # in one piece, beside other writers
