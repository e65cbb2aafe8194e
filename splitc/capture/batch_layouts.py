"""Find which dimension of each input is the batch: dim 0, or another one in models that take sequences time first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from splitc.capture.example import Example, layouts
from splitc.errors import CaptureError
from splitc.ir.program import Program
from splitc.ir.regions import regions


def first_apart(example: Example, validated: Callable[[Example], Program]) -> Program:
    """The program with the first batch dimensions that keep examples apart; where none do, with the first ones.

    validated: captures the model on an example and validates the graph.  Raises CaptureError.
    """
    others = layouts(example.tensors) if len(example.tensors) > 1 else ()
    refused, coupled = None, None
    for dims in (example.batch_dims, *(dims for dims in others if dims != example.batch_dims)):
        try:
            program = validated(replace(example, batch_dims=dims))
        except CaptureError as error:
            refused = refused or error
            continue
        if not program.coupled and not (coupled and any(regions(program))):
            return program
        coupled = coupled or program
    if coupled is None:
        assert refused is not None
        raise refused
    return coupled
