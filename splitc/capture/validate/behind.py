"""Validate a capture behind its plan: what will be found is expected first, and looked for in a thread.

The thread can only say yes: the model and its graph agree bit by bit, and the terms of the loss are those expected, of
a run in which layers return random numbers.  For anything else the capture is validated anew where the verdict is
waited for, and what that says counts.

It runs beside the user's Python, so it has copies of its own, and leaves what is of the process as it is: generators,
default dtype, warnings, functions of torch that a trace replaces (which waits for it).  Regions and other branches on
the batch size, which need those, are validated at once, as are small models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod

from torch import Tensor, nn

from splitc.capture.example.division import examples_of
from splitc.capture.example.example import Example
from splitc.capture.loss_terms import is_known
from splitc.capture.validate.apart import EXAMPLES
from splitc.capture.validate.compare import compare_runs
from splitc.capture.validate.generic_data import GenericData
from splitc.capture.validate.reference_copy import Precision, ReferenceCopy
from splitc.capture.validate.validate import LARGE, run_apart, with_found
from splitc.ir.comm_ops import linear_cross_entropy
from splitc.ir.fake_mode import KERNELS
from splitc.ir.graph import copy_graph, info
from splitc.ir.program import Program, Refusal, TensorSpec
from splitc.ir.regions import regions
from splitc.runtime.generators import same_generators

_SMALL = 1 << 24  # numbers that a forward of three examples reads and makes, and 2^16 a node: less than a second

_RUNNING: set[threading.Thread] = set()


class Behind:
    """The validations of one analysis.  holds: None until the thread has ended."""

    def __init__(self) -> None:
        self.holds: bool | None = None
        self._checks: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._run, name="splitc validation")

    def expect(self, program: Program, model: nn.Module, example: Example) -> Program | None:
        """The program with what its validation, which is put off, will find; None for one to be validated at once."""
        if not _may_wait(program, model, example):
            return None
        data, copied = GenericData.of(program, example.tensors), _copied(program)
        batches = [data.draw(EXAMPLES, seed) for seed in range(2)]
        three = examples_of(program, batches[0], 0, EXAMPLES)
        try:
            with same_generators():
                wide = ReferenceCopy(copied, model, example, Precision.WIDE, narrow=True)
                apart, outputs = run_apart(program, wide, three, guess=True)
                expected = replace(with_found(program, apart, ()), outputs=outputs)
        except Exception:  # what is wrong shows where nothing is guessed
            return None
        if expected.coupled:
            return None
        exact = ReferenceCopy(copied, model, example, Precision.EXACT)
        exact.beside = wide.beside = True
        self._checks += [
            partial(_require_found, copied, wide, three, _facts(expected)),
            partial(compare_runs, copied, exact, batches),
        ]
        return expected

    def then(self, keep: Callable[[], object]) -> None:
        """Call `keep` when the validations so far have shown that all is as expected."""
        self._checks.append(keep)

    def start(self) -> None:
        """Begin, when the plan is there; a second time does nothing."""
        if self.holds is not None or self._thread in _RUNNING:
            return
        if not self._checks:
            self.holds = True
            return
        _RUNNING.add(self._thread)
        self._thread.start()

    def wait(self) -> bool:
        """Whether all is as expected, in the end."""
        self.start()
        if self.holds is None:
            self._thread.join()
        return bool(self.holds)

    def _run(self) -> None:
        try:
            with KERNELS:  # measuring memory switches kernels of the whole process
                for check in self._checks:
                    check()
            self.holds = True
        except Exception:  # whoever waits looks again
            self.holds = False
        finally:
            self._checks.clear()
            _RUNNING.discard(self._thread)


def settle() -> None:
    """Wait for the threads: a trace replaces functions of torch, which are of the process."""
    for thread in list(_RUNNING):
        thread.join()


def _may_wait(program: Program, model: nn.Module, example: Example) -> bool:
    """Whether a program is large enough, and its validation changes nothing that is of the process."""
    tensors = [*model.parameters(), *model.buffers(), *example.tensors.values()]
    specs = [info(node).spec for node in program.graph.nodes]
    made = sum(prod(spec.at(EXAMPLES)) for spec in specs if isinstance(spec, TensorSpec))
    read = sum(p.numel() for p in model.parameters())
    return (
        threading.current_thread() is threading.main_thread()
        and read + made + (len(specs) << 16) > _SMALL
        and read <= LARGE
        and all(tensor.device.type == "cpu" for tensor in tensors)
        and is_known(program)
        and not program.graph.find_nodes(op="call_function", target=linear_cross_entropy)  # which may be traced anew
        and not (any(regions(program)) or program.guards or program.part or example.is_said)
    )


def _copied(program: Program) -> Program:
    """The program with graphs of its own, which no pass changes."""
    outputs = program.outputs
    if not isinstance(outputs, Refusal):
        outputs = replace(outputs, graph=copy_graph(outputs.graph)[0])
    return replace(program, graph=copy_graph(program.graph)[0], outputs=outputs)


def _require_found(program: Program, reference: ReferenceCopy, three: dict[str, Tensor], expected: object) -> None:
    apart, outputs = run_apart(program, reference, three)
    if _facts(replace(with_found(program, apart, ()), outputs=outputs)) != expected:
        raise ValueError("what was expected is not what there is")


def _facts(program: Program) -> object:
    outputs = program.outputs
    of_outputs = outputs if isinstance(outputs, Refusal) else (outputs.coupled, outputs.flattened)
    return program.loss_terms, program.coupled, program.flattened, of_outputs
