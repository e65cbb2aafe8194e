"""Write the description of a rank as source that constructs it, with comments."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from splitc.codegen.features import features
from splitc.codegen.layout import wrapped
from splitc.ir.constructors import literal

NOTES = {
    "examples": "this rank's examples of the global batch: first, one past the last",
    "replicas": "ranks that hold the same parameters and sum their gradients",
    "routes": "ranks of other roles, and the examples exchanged with each",
    "group_routes": "the same, of values that one of both roles has for its whole group",
    "group": "ranks that share the parameters and compute each other's examples",
    "microbatches": "parts of every reader's examples, which go through the ranks one after another",
    "updated_every_microbatch": "the optimizer steps in every microbatch",
    "shards": "this rank's part of each parameter",
    "all_reduce": "how gradients are summed",
    "readers": "ranks that read the data",
    "accumulate": "batches to an update",
    "batch_offsets": "where each reader's examples begin, and the end",
    "inputs": "what a reader reads",
    "guards": "batch sizes for which the traced branches hold",
    "no_evaluation": "why worker.evaluate is refused",
    "ranks": "all ranks of the role",
    "own_sums": "parameters used on a rank's own examples: their gradients are summed over all of the role",
    "predicts": "the inputs that worker.predict takes",
    "no_outputs": "why worker.predict is refused",
    "reader": "as one of the readers, to which the model's output comes",
    "scales_loss": "backward begins with the loss times the scale of float16",
}
"""The comments of a description's fields that every rank may have."""

_SCHEMES = {
    "BK": "one microbatch: all examples of the group",
    "B": "a microbatch is the examples of one rank of the group",
    "B/K": "a microbatch is an equal part of every rank's examples",
}
"""What Krizhevsky's names for the schemes mean."""


def source(value: Any, before: str = "") -> list[str]:
    """A value of a description as source, after the text `before`; long ones take several lines."""
    if is_dataclass(value):
        return [f"{before}{type(value).__name__}(", *(f"    {line}" for line in _fields(value)), ")"]
    if isinstance(value, dict):
        items = [line for key, each in value.items() for line in ended(source(each, f"{literal(key)}: "))]
        return [f"{before}{{", *(f"    {line}" for line in items), "}"]
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [f"{before}(", *(f"    {line}" for each in value for line in ended(source(each))), ")"]
    return wrapped(f"{before}{_inline(value)}", 100)


def _inline(value: Any) -> str:
    """A value on one line; named tuples with the names of their fields."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = zip(value._fields, value, strict=True)
        return f"{type(value).__name__}({', '.join(f'{k}={_inline(v)}' for k, v in pairs if v is not None)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_inline, value))}{',' if len(value) == 1 else ''})"
    return literal(value)


def _fields(spec: Any) -> list[str]:
    """The arguments that construct a description, without defaults; the comment of a long one stands above it."""
    lines: list[str] = []
    notes, constants = dict(NOTES), {"updated_every_microbatch": f'EVERY_MICROBATCH["{getattr(spec, "role", "")}"]'}
    for feature in features():
        notes |= feature.notes
        constants |= {name: constant for name, (constant, _) in feature.constants.items()}
    for field in fields(spec):
        name, value = field.name, getattr(spec, field.name)
        if value == (field.default if field.default_factory is MISSING else field.default_factory()):
            continue
        note = _SCHEMES[value] if name == "scheme" else notes.get(name, "")
        text = [f"{name}={constants[name]}"] if name in constants else source(value, f"{name}=")
        if note and len(text) == 1:
            lines.append(f"{text[0]},".ljust(32) + f"  # {note}")
        else:
            lines += [f"# {note}"] * bool(note) + ended(text)
    return lines


def ended(lines: list[str]) -> list[str]:
    """Lines that a comma ends."""
    return [*lines[:-1], f"{lines[-1]},"]
