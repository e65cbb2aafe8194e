"""Compare a captured graph with its model, and find how the loss adds up over parts of the batch.

On generic examples, on private copies, with dropout off: the loss, every gradient and every buffer must agree bit by
bit, or in float64 to 1e-9, run after run without restoring anything in between, and no Python state may change.  Then
the graph alone runs in float64 on parts of the batch, with BatchNorm in evaluation mode (`apart`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product

from torch import Tensor, fx, nn

from splitc.capture.example.division import examples_of
from splitc.capture.example.example import Example
from splitc.capture.loss_terms import LossTerms, is_known
from splitc.capture.trace.random_calls import located
from splitc.capture.validate.apart import EXAMPLES, PARTS, Apart, NotFinite
from splitc.capture.validate.compare import Fails, compare
from splitc.capture.validate.generic_data import Draw, GenericData
from splitc.capture.validate.gradients import differing, gradients
from splitc.capture.validate.other_branches import with_other_branches
from splitc.capture.validate.parts import unlike
from splitc.capture.validate.reference_copy import Precision, ReferenceCopy
from splitc.errors import CaptureError
from splitc.ir.comm_ops import returned
from splitc.ir.graph import info
from splitc.ir.interpreter import NodeRunner
from splitc.ir.layers import Coupling
from splitc.ir.program import Program, Refusal, TensorSpec
from splitc.runtime.generators import same_generators

_SEEDS = 4  # tried where a loss is not finite
LARGE = 1 << 28  # parameters; more are not copied in float64


def validate_capture(program: Program, model: nn.Module, example: Example) -> Program:
    """Check that the captured graph computes the model's loss, gradients and buffers; return it with what was found.

    That is the terms of the loss, or where examples are coupled, and what could not be checked as it should.
    Raises CaptureError where the two differ, and for Python state that forward changes.
    """
    data = GenericData.of(program, example.tensors)
    may_widen = sum(p.numel() for p in model.parameters()) <= LARGE
    size = next((n for n in range(EXAMPLES, program.batch) if program.allows(n)), max(program.batch, EXAMPLES))
    failures: list[Exception] = []
    for how, seed in product(Draw, range(_SEEDS)):
        batches = [data.draw(size, seed + _SEEDS * k, how) for k in range(2)]
        try:
            with same_generators():
                notes = compare(program, model, example, batches, may_widen)
                threes = [examples_of(program, batches[0], 0, EXAMPLES)]
                threes += [examples_of(program, example.tensors, k, k + EXAMPLES) for k in unlike(example, EXAMPLES)]
                found = (_apart(program, model, example, three, may_widen) for three in threes)
                apart, outputs, widened = max(found, key=lambda each: len(each[0].couplings))
        except (NotFinite, Fails) as error:
            failures.append(error)
            continue
        if how is not Draw.GENERIC:
            notes.append(f"Validated on {how.text}, since it does not run on generic data: {failures[0]}.")
        if not widened:
            notes.append("Examples were compared without float64, in which the model does not run.")
        again = partial(compare, program, model, example, may_widen=may_widen)
        guards = with_other_branches(program, model, example, again, partial(data.draw, seed=seed, how=how))
        return replace(with_found(program, apart, notes), guards=guards, outputs=outputs)
    raise CaptureError(str(failures[-1])) from failures[-1].__cause__


def with_found(program: Program, apart: Apart, notes: Iterable[str]) -> Program:
    """The program with what was found."""
    terms = apart.loss_terms()
    order = {node: k for k, node in enumerate(program.graph.nodes)}
    couplings = sorted(apart.couplings.items(), key=lambda each: order[each[0]])
    return replace(
        program,
        loss_terms=terms,
        coupled=tuple(Coupling(node.name, why) for node, why in couplings),
        flattened={node.name: outer for node, outer in apart.flattened.items()},
        notes=(*program.notes, *notes),
    )


def _apart(
    program: Program, model: nn.Module, example: Example, tensors: dict[str, Tensor], may_widen: bool
) -> tuple[Apart, Program | Refusal, bool]:
    """Run the graph and that of outputs on parts of the batch, in float64 if they run there; also whether they did.

    Raises NotFinite and CaptureError.
    """
    for precision in (Precision.WIDE, Precision.OWN) if may_widen else (Precision.OWN,):
        reference = ReferenceCopy(program, model, example, precision, narrow=is_known(program))
        try:
            apart, outputs = run_apart(program, reference, tensors)
            break
        except CaptureError:
            if precision is Precision.OWN:
                raise
    if not apart.couplings and apart.loss_terms() and not is_known(program):
        _require_gradients_apart(program, reference, tensors, apart)
    return apart, outputs, reference.wide


def run_apart(
    program: Program, reference: ReferenceCopy, tensors: dict[str, Tensor], guess: bool = False
) -> tuple[Apart, Program | Refusal]:
    """Run the graph and that of outputs on parts of the batch.  guess: see `Apart`."""
    apart = Apart(program, LossTerms(program.graph, program.part is not None), reference.tolerance, guess)
    apart.run(reference, tensors)
    if not apart.couplings and apart.unseen:
        apart = Apart(program, apart.terms, reference.tolerance, guess)
        apart.run(reference, tensors, noise=True)
    return apart, _outputs_apart(apart, reference, tensors)


def _outputs_apart(found: Apart, reference: ReferenceCopy, tensors: dict[str, Tensor]) -> Program | Refusal:
    """The program of outputs with what its run on parts has shown, where it computes what the loss does not read.

    found: what that of the loss has shown.  coupled: values of which a rank's examples cannot be told.
    """
    outputs, known = found.program.outputs, {node.name for node in found.program.graph.nodes}
    if (
        isinstance(outputs, Refusal)
        or found.program.part
        or all(n.name in known or n.target is returned for n in outputs.graph.nodes)
    ):
        return outputs
    terms = LossTerms(outputs.graph)
    terms.uses.clear()
    apart = Apart(outputs, terms, reference.tolerance, found.guess)
    try:
        apart.run(reference, {each.name: tensors[each.name] for each in outputs.inputs})
    except CaptureError as error:
        if reference.wide:
            raise
        return Refusal(str(error))
    (marked,) = outputs.graph.output_node().all_input_nodes
    mixed, coupled = set[fx.Node](), {node.name for node in found.couplings}
    for node in outputs.graph.nodes:
        if node.name in coupled or not mixed.isdisjoint(node.all_input_nodes):
            mixed.add(node)
            apart.couplings.pop(node, None)
        spec = info(node).spec
        is_unknown = apart.flattened.get(node) == 0 and marked in node.users
        if is_unknown or (node in mixed and isinstance(spec, TensorSpec) and spec.rows > 1):
            apart.couplings[node] = (
                f"{info(node).source}: which rows of {node.name} an example has is not known; return a row for each"
            )
    return located(with_found(outputs, apart, ()))


def _require_gradients_apart(
    program: Program, reference: ReferenceCopy, tensors: Mapping[str, Tensor], apart: Apart
) -> None:
    """Raise CaptureError where the gradients of parts of the batch do not add up: in a backward of the user's own."""
    runs = []
    for k in range(3):
        runner = NodeRunner(reference.root, program.graph, apart.scaled(k))
        with reference.running(apart=True):
            loss = runner.run_named(reference.values(examples_of(program, tensors, PARTS[k][0], PARTS[k][-1] + 1)))
        del runner
        runs.append(gradients(program, reference.root, loss))
    whole, first, rest = runs
    both = first | rest | {name: first[name].plus(rest[name]) for name in first.keys() & rest.keys()}
    if wrong := list(differing(whole, both, reference.tolerance)):
        raise CaptureError(
            f"{info(program.loss).source}: the loss couples examples: the gradients of {', '.join(wrong[:4])} over "
            f"parts of the batch do not add up to those over the whole; look for a backward that mixes examples"
        )
