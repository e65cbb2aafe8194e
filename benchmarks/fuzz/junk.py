"""Strategies of Hypothesis: values of no use, and valid data in which something was changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

MARK = "splitc_fuzz_ran"
PAYLOADS = (
    f"__import__('os').system('{MARK}')",
    f'"""\n__import__("os").system("{MARK}")\n"""',
    f"');__import__('os').system('{MARK}')#",
    f"x = 1\nimport os; os.system('{MARK}')",
    f"{{__import__('os').system('{MARK}')}}",
    f'\\"""+str(__import__(\'os\').system(\'{MARK}\'))+"""',
    f"a\x00{MARK}",
    f"\\N{{QUOTATION MARK}} {MARK}\\",
    f"\r\u2028\u202e{MARK}",
)
"""Texts that run, or end what holds them, where they become code."""

NUMBERS = (0, -1, 1, 2, 2**31, 2**63, 10**30, -(2**70), 0.0, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -1.5, 0.5)
TEXTS = ("", " ", "all", "None", "nan", "../../x", "/etc/passwd", "\ud800", "é" * 300, "[0-", "*", "conv", "fc2", "BK")

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.integers(),
    st.floats(),
    st.sampled_from(TEXTS),
    st.sampled_from(PAYLOADS),
    st.text(max_size=12),
)
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
words = st.one_of(st.sampled_from((*TEXTS, *PAYLOADS)), st.text(max_size=12), st.sampled_from(NUMBERS).map(str))
shell_words = words.map(lambda text: text.replace("\x00", "").encode("utf-8", "replace").decode())
"""Words that a command line can have."""


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in nested data and each of its keys."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [each for key in keys for each in _places(value[key])]


@st.composite
def mutated(draw: Any, valid: Sequence[Any]) -> Any:
    """One of the valid data with one to three changes."""
    data = copy.deepcopy(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 3))):
        if not (places := _places(data)):
            break
        holder, key = draw(st.sampled_from(range(len(places))).map(places.__getitem__))
        old = holder[key]
        change = draw(st.sampled_from(("replace", "replace", "remove", "add", "near", "wrap", "swap")))
        if change == "replace":
            holder[key] = draw(junk)
        elif change == "remove":
            del holder[key]
        elif change == "add" and isinstance(holder, dict):
            holder[draw(words)] = draw(junk)
        elif change == "near" and isinstance(old, (int, float)):
            holder[key] = draw(st.sampled_from((-old, old + 1, old - 1, old * 1000, float(old), str(old), bool(old))))
        elif change == "wrap":
            holder[key] = draw(st.sampled_from(([old], {"a": old}, [old, old], [])))
        else:
            other, at = draw(st.sampled_from(range(len(places))).map(places.__getitem__))
            holder[key] = copy.deepcopy(other[at]) if _has(other, at) else None
    return data


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


@st.composite
def torn(draw: Any, valid: Sequence[bytes]) -> bytes:
    """One of the valid files, cut off, with bits flipped, zeros, or other bytes in it."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        change = draw(st.sampled_from(("cut", "flip", "zero", "insert", "empty")))
        if change == "cut":
            del data[at:]
        elif change == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif change == "zero":
            data[at : at + 16] = bytes(len(data[at : at + 16]))
        elif change == "insert":
            data[at:at] = draw(st.one_of(st.binary(max_size=8), st.sampled_from(PAYLOADS).map(str.encode)))
        else:
            data.clear()
    return bytes(data)


@st.composite
def json_texts(draw: Any, valid: Sequence[Any]) -> bytes:
    """A file of JSON: changed as data, as bytes, or nested deeper than a reader goes."""
    how = draw(st.sampled_from(("data",) * 12 + ("bytes", "bytes", "deep")))
    if how == "data":
        return json.dumps(draw(mutated(valid))).encode()
    if how == "bytes":
        return bytes(draw(torn([json.dumps(each).encode() for each in valid])))
    deep: int = draw(st.integers(900, 100_000))
    return b'{"schema": 1, "world": ' + b"[" * deep
