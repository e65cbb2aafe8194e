"""Find which dimension of each input is the batch: dim 0, or another one in models that take sequences time first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from splitc.capture.example.example import Example, layouts
from splitc.errors import CaptureError
from splitc.ir.program import Program
from splitc.ir.regions import regions


def first_apart(example: Example, validated: Callable[[Example], Program]) -> Program:
    """The program with the first batch dimensions that keep examples apart; where none do, with the first ones.

    validated: captures the model on an example and validates the graph.  Raises CaptureError.
    """
    others = layouts(example.tensors) if len(example.tensors) > 1 and not example.is_said else ()
    refused, taken, why = None, None, dict[str, str]()
    for dims in (example.batch_dims, *others):
        laid_out = replace(example, batch_dims=dims)
        if (text := _text(laid_out)) in why:
            continue
        try:
            program = validated(laid_out)
        except CaptureError as error:
            refused, why[text] = refused or error, str(error)
            continue
        is_apart = not program.coupled and not (taken and any(regions(program)))
        why[text] = "it is all the user's own code" if not program.coupled else program.coupled[0].why
        if is_apart or taken is None or (_keeps_rows(program) and not _keeps_rows(taken[0])):
            taken = program, laid_out
        if is_apart:
            break
    if taken is None or (refused is not None and not _keeps_rows(taken[0])):
        assert refused is not None
        raise refused
    program, laid_out = taken
    reasons = "".join(f"; not {text}, since {reason}" for text, reason in why.items() if text != _text(laid_out))
    note = f"The batch is {_text(laid_out)}, {laid_out.batch} examples{reasons}."
    return replace(program, notes=(*program.notes, note)) if laid_out.batch_dims or reasons else program


def _keeps_rows(program: Program) -> bool:
    """Whether what its regions keep for the next batch has a row for each example."""
    return all(own.keeps_rows for _, own in regions(program))


def _text(example: Example) -> str:
    """`dim 1 of words, dim 0 of target`."""
    dims = {name: example.batch_dims.get(name, 0) for name in example.tensors}
    of = {dim: " and ".join(name for name, d in dims.items() if d == dim) for dim in dict.fromkeys(dims.values())}
    return ", ".join(f"all of {names}" if dim is None else f"dim {dim} of {names}" for dim, names in of.items())
