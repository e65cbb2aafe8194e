"""Write a function of the ranks of one rank program: one line for each action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from splitc.codegen.cut_lines import Comm, CutLines
from splitc.codegen.emit import Emitter
from splitc.codegen.features import features
from splitc.codegen.layout import Line, aligned, block, wrapped
from splitc.codegen.microbatches import microbatched
from splitc.codegen.stage_names import buckets_text, constant, method_name, variables
from splitc.ir import comm_ops
from splitc.ir.graph import cut_of, has_own_code, info, tensor_spec
from splitc.ir.program import LoweredProgram, Stage
from splitc.ir.schedule.actions import Action
from splitc.ir.schedule.loop_nest import loop_nest
from splitc.ir.stage_parts import Part, arriving, is_idle, parts_of, returned_cuts, values_sent, weighed
from splitc.ir.wire import of_action
from splitc.runtime.collectives.layouts import State


class StepWriter(CutLines):
    """Writes one function of a rank program, from its actions."""

    def function(self, doc: str) -> list[str]:
        """A whole function."""
        actions = [a for a in self.rank_program.actions if not a.row.in_round]
        if not self._training:
            actions = list(self.rank_program.whole)
        if self._predicts:
            actions = [a for a in actions if a.verb != "sum_loss"]
        alone = "sum(losses)" if self._microbatched else "loss.detach()"
        loss = alone if self._plan.world == 1 else "total.wait()"
        result = self._returned() if self._predicts else loss
        body = [*self._body(actions), (f"return {result}", "")]
        return self.function_of(self._name, self._inputs(), doc, body)

    def function_of(self, name: str, inputs: Sequence[str], doc: str, body: Sequence[Line]) -> list[str]:
        """The lines of a function that takes `inputs` after communicators and stage."""
        arguments = ", ".join([*map(self.comm, self._comms), "stage", *inputs])
        return [*wrapped(f"def {name}({arguments}):", 120), f'    """{doc}"""', *aligned(body, "    ")]

    def _inputs(self) -> list[str]:
        """The inputs of the program that any of the stages reads or passes on."""
        named = [pair for stage in self.stages for pair in variables(stage.graph).items()]
        return [name for node, name in named if node.op == "placeholder"]

    def _body(self, actions: Sequence[Action]) -> list[Line]:
        if not self._microbatched:
            return [line for action in actions for line in self.lines(action)]
        number = max(self.program.turns(stage) for stage in self.stages)
        nest = loop_nest(actions, number, self._repeats, self._is_early_entry)
        self._waits |= any(stage.has_loss and stage.role in nest.apart for stage in self.stages)
        return microbatched(nest, self.lines, self.comm, self._tables)

    def lines(self, action: Action) -> list[Line]:
        """The lines of one action."""
        comm, row = self.part(action), action.row
        if row.line:
            return [(f"{comm}.{row.line}", row.note)]
        if row.moves_cut:
            return [self.line(self.program.stage(action.role), action)]
        if action.verb in _LINES:
            return _LINES[action.verb](self, action, comm)
        own = (lines for each in features() if (lines := each.lines(self, action, str(comm))) is not None)
        return next(own, [])  # a line of another one

    def _tied(self, action: Action, comm: Comm) -> list[Line]:
        first = next(each for each in self.rank_program.actions if each.verb == action.verb)
        line = f"{comm}.all_reduce_tied(stage, TIED)", "over all roles that use them"
        return [line] if action.value == first.value else []

    def _returned(self) -> str:
        """What the model returns, of the values that came to this rank; None where it reads no data."""
        for stage in (stage for stage in self.stages if stage.has_loss):
            marked = stage.graph.output_node().all_input_nodes[0]
            names = {node: self.received(cut) for node in stage.graph.nodes if (cut := info(node).cut)}
            names |= {node: name for node, name in variables(stage.graph).items() if node.op == "placeholder"}
            emitter = Emitter(names, str, str)
            emitter.folded |= {n: emitter.expression(n) for n in marked.all_input_nodes if n not in names}
            return emitter.value(marked.args[0])
        return "None"

    def _weigh(self, action: Action, comm: Comm) -> list[Line]:
        return self._weights(self.program.stage(action.role), comm, whole=True)

    def _weights(self, stage: Stage, comm: Comm, whole: bool = False) -> list[Line]:
        """What the loss divides by: of the whole batch before microbatches, or on its way while the forward runs."""
        names = variables(stage.graph)
        made = [node for node in weighed(stage) if info(node).once == whole]
        if not made:
            return []
        given = [self.received(cut_of(n)) if n.op != "placeholder" else names[n] for n in arriving(stage, Part.WEIGH)]
        call = self._call(stage, Part.WEIGH, comm, given if whole else self._given(stage, Part.WEIGH, comm))
        return [(f"{', '.join(names[node] for node in made)} = {call}", "what the loss divides by")]

    def _call(self, stage: Stage, part: Part, comm: Comm, given: Sequence[str]) -> str:
        """The call of a method of a stage."""
        method = method_name(self.program, stage, self._alone, part)
        return f"stage{f'.{method}' * (method != 'forward')}({', '.join([str(comm), *given])})"

    def _given(self, stage: Stage, part: Part, comm: Comm) -> list[str]:
        """The arguments of a method, but for what the forward returned."""
        names = variables(stage.graph)

        def given(node: fx.Node) -> str:
            is_input = node.op == "placeholder"
            return self.piece(names[node], tensor_spec(node), comm) if is_input else self.argument(cut_of(node), comm)

        weights = weighed(stage, part) if part is not Part.WEIGH else []
        return [*map(given, arriving(stage, part)), *(names[node] for node in weights)]

    def _forward(self, action: Action, comm: Comm) -> list[Line]:
        stage = self.program.stage(action.role)
        if self.program.loss.target is comm_ops.returned and (stage.has_loss or is_idle(stage)):
            return []
        lines = [line for cut in stage.receives for line in self.entry(cut, comm)]
        returned = [self.returned(cut) for cut in returned_cuts(stage)]
        if stage.has_loss:
            returned.append(self.kept("loss") if self._waits else "loss")
        inside = [*self._weights(stage, comm), *self._run(stage, comm, returned)]
        adds = stage.has_loss and stage.role in self._microbatched
        lost = [(self.appended("losses", f"{returned[-1]}.detach()"), "")] if adds else []
        if self.program.autocast is None:
            return [*lines, *inside, *lost]
        return [*lines, *block(f"with {comm}.autocast({self.program.autocast}):", inside), *lost]

    def _run(self, stage: Stage, comm: Comm, results: Sequence[str]) -> list[Line]:
        """The calls that compute `results`: those cuts of the stage that it makes, and its loss."""
        call = self._call(stage, Part.FORWARD, comm, self._given(stage, Part.FORWARD, comm))
        if stage.after:
            last = parts_of(stage)[-1]
            before = f"*{call}" if len(stage.forward) > 1 else call
            call = self._call(stage, last, comm, [before, *self._given(stage, last, comm)])
        elif stage.forward:
            return _taken(
                call, stage.forward, dict(zip(results, (node.name for node in values_sent(stage)), strict=True))
            )
        return [(f"{', '.join(results)} = {call}" if results else call, "")]

    def _sum_loss(self, action: Action, comm: Comm) -> list[Line]:
        if self._plan.world == 1:
            return []
        stage = next((stage for stage in self.stages if stage.has_loss), None)
        if stage is None:
            return [(f"total = {comm}.sum_loss({zero_text(self.program)})", "the loss is computed on other ranks")]
        loss = "sum(losses)" if stage.role in self._microbatched else "loss"
        apart = self._plan.trains_in_units and self._training
        ends = f", at a {self._plan.cycle}'s end of all" * self._plan.joins_losses
        note = f"a unit's loss{ends}" if apart else "the global loss"
        own = ", own=True" if info(self.program.loss).state is State.BATCH else ""
        return [(f"total = {comm}.sum_loss({loss}{own})", note)]

    def _backward(self, action: Action, comm: Comm) -> list[Line]:
        stage = self.program.stage(action.role)
        outputs = [
            (self.kept(cut.name, last=True), self.output_gradient(cut)) for cut in returned_cuts(stage) if cut.gradient
        ]
        if stage.has_loss:
            loss = self.kept("loss", last=True) if self._waits else "loss"
            outputs.append((f"{comm}.scaled({loss})" if self.program.autocast == torch.float16 else loss, ""))
        if len(outputs) == 1:
            ((value, gradient),) = outputs
            call = f"{value}.backward({gradient})"
        else:
            values, gradients = (", ".join(pair[k] or "None" for pair in outputs) for k in (0, 1))
            call = f"torch.autograd.backward(({values}), ({gradients}))"
        inside: list[Line] = [(call, "")]
        multiplies = any(each.verb == "multiply" and each.role == stage.role for each in self.rank_program.actions)
        if multiplies:
            inside.append((f"{comm}.multiply()", "late-multiplied gradients, W' = E^T X"))
        around: list[Line] = []
        after: list[Line] = []
        if stage.buckets:
            once = stage.role in self._microbatched and self._plan.grouping(stage.role).updates == "once"
            when = "in the last microbatch" if once else "during backward"
            note = f"{buckets_text(self.program, stage, stage.buckets)}, {when}"
            meets = multiplies or any(any(of_action(self.program, r, action)) for r in self._plan.roles[stage.role])
            flags = ", flags=True" + ", early=False" * meets if has_own_code(stage.graph) else ""
            around.append((f"{comm}.all_reduce(stage, {constant('BUCKETS', self.rank_program, stage)}{flags})", note))
        for feature in features():
            own, behind = feature.around_backward(self.program, stage, str(comm))
            around, after = around + own, after + behind
        if not around:
            return [*inside, *after]
        managers, notes = zip(*around, strict=True)
        return [*block(f"with {', '.join(managers)}:", inside, "; ".join(notes)), *after]


_LINES = {
    "sum_loss": StepWriter._sum_loss,
    "all_reduce_tied": StepWriter._tied,
    "weigh": StepWriter._weigh,
    "forward": StepWriter._forward,
    "backward": StepWriter._backward,
}
"""The lines of verbs that need more than a template; others are part of the backward, or wait in an average."""


def zero_text(program: LoweredProgram) -> str:
    """A zero of the loss's dtype, for ranks that do not compute the loss."""
    dtype = tensor_spec(program.loss).dtype
    return "torch.zeros(())" if str(dtype) == "torch.float32" else f"torch.zeros((), dtype={dtype})"


def _taken(call: str, returned: Sequence[str], results: Mapping[str, str]) -> list[Line]:
    """The lines that take `results`, variable -> node, of what a forward returns."""
    nodes = list(results.values())
    if nodes == list(returned[: len(nodes)]):
        some = "" if len(nodes) == len(returned) else "[0]" if len(nodes) == 1 else f"[:{len(nodes)}]"
        return [(f"{', '.join(results)} = {call}{some}" if results else call, "")]
    names = {node: name for name, node in reversed([*results.items()])}
    again = [(f"{name} = {names[node]}", "") for name, node in results.items() if names[node] != name]
    return [(f"{', '.join(names.get(node, '_') for node in returned)} = {call}", ""), *again]
