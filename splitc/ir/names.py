"""Suggestions for names that are nearly right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near_name(wrong: str, known: Iterable[str]) -> str:
    """`did you mean layer_separation? `, to stand before what there is; nothing when no name is near."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(wrong.lower(), names, 1)
    return f"did you mean {names[near[0]]}? " if near else ""
