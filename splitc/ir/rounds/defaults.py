"""What rounds imply where a plan.json leaves it out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def synchronised(fields: Mapping[str, Any]) -> tuple[int, str] | None:
    """How many ranks train together, and how layers are synchronised that one of them trains; None: as usual."""
    rounds = fields.get("rounds")
    return (rounds.unit, "average") if rounds else None
