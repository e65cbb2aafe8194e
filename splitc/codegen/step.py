"""Write a part's `step` and `evaluate`: one line for each action."""

from __future__ import annotations

from collections.abc import Sequence

from splitc import units
from splitc.codegen.stage import aligned, forward_inputs, method_name, returned_cuts, variables
from splitc.ir.actions import Action
from splitc.ir.plan import SERVER
from splitc.ir.program import Cut, LoweredProgram, PlacedProgram, Program, RankProgram, Stage, TensorSpec
from splitc.ir.wire import bucket_nbytes

Line = tuple[str, str]
"""A statement and its comment."""

_EVALUATED = ("send", "recv", "modulo", "slice_batch", "forward", "sum_loss", "send_parameters", "pull")
_IN_A_TURN = ("modulo", "forward", "backward", "all_reduce", "push", "multiply", "modulo_grad", "update")


def step_functions(program: LoweredProgram, part: RankProgram) -> list[str]:
    """The lines of both functions."""
    train, evaluate = _Writer(program, part, training=True), _Writer(program, part, training=False)
    return [
        *train.function("step", f"One batch forward and backward; the gradients {_where(train.stages)}."),
        "",
        "",
        *evaluate.function("evaluate", "The loss of one batch, forward only."),
    ]


def _where(stages: Sequence[Stage]) -> str:
    """Where a step leaves the gradients."""
    if not stages:
        return "are left in `.grad`, summed over the workers"
    summed = ", summed" if any(stage.buckets for stage in stages) else ""
    if any(stage.served for stage in stages):
        return f"are left in `.grad`{summed}, or go to the servers" if summed else "go to the servers"
    return f"are left in `.grad`{summed}"


def buckets_name(part: RankProgram, stage: Stage) -> str:
    """The constant that lists the gradients which a stage sums."""
    return "BUCKETS" if len(part.roles) == 1 else f"{stage.role.upper()}_BUCKETS"


class _Writer:
    def __init__(self, program: LoweredProgram, part: RankProgram, training: bool) -> None:
        self._program, self._part, self._training = program, part, training
        self.stages = [program.stage(role) for role in part.roles if role != SERVER]
        self._first_tied = next((a.value for a in part.actions if a.verb == "all_reduce_tied"), "")
        self._turned = {
            stage.role: program.num_microbatches(stage) for stage in self.stages if program.num_microbatches(stage) > 1
        }

    def function(self, name: str, doc: str) -> list[str]:
        """A whole function."""
        arguments = ", ".join([*map(self._seat, self._seats()), "stage", *self._inputs()])
        actions = [a for a in self._part.actions if self._training or a.verb in _EVALUATED]
        body = [*self._body(actions), (self._return_loss(), "")]
        return [f"def {name}({arguments}):", f'    """{doc}"""', *aligned(body, "    ")]

    # -- names ---------------------------------------------------------------------------------------------------------

    def _seats(self) -> list[str]:
        return [role for role in self._part.roles if role != SERVER] or [SERVER]

    def _seat(self, role: str) -> str:
        """What stands for the rank as one of `role`."""
        return "comm" if len(self._seats()) == 1 else role

    def _inputs(self) -> list[str]:
        return [
            names[node]
            for stage in self.stages
            for names in [variables(stage.graph)]
            for node in stage.graph.nodes
            if node.op == "placeholder"
        ]

    def _stage(self, role: str) -> Stage:
        return self._program.stage(role)

    def _source(self, cut: Cut) -> str:
        """What its producer, or an input, has of a cut; its own examples only."""
        if cut.passes("slice_batch"):
            return f"{cut.name}_own"
        stage = self._stage(cut.producer)
        if cut.value in stage.inputs:
            names = {str(n.target): name for n, name in variables(stage.graph).items() if n.op == "placeholder"}
            return names[cut.value]
        return cut.name

    def _sent(self, cut: Cut) -> str:
        """A cut in the dtype that its receiver expects: which operations autocast casts differs between devices."""
        source = self._source(cut)
        is_made = cut.spec.dtype.is_floating_point and cut.value not in self._stage(cut.producer).inputs
        return f"{source}.to({cut.spec.dtype})" if self._program.autocast is not None and is_made else source

    def _taken(self, cut: Cut) -> str:
        """What its consumer has of it before its group gathers more."""
        if not cut.passes("send"):
            return self._source(cut)
        return cut.name if len(self._seats()) == 1 else f"{cut.name}_{cut.consumer}"

    def _entered(self, cut: Cut) -> str:
        """What the consumer's stage reads."""
        if cut.passes("modulo"):
            return f"{cut.name}_group"
        if not cut.passes("send") and cut.gradient and self._training:
            return f"{cut.name}_{cut.consumer}"
        return self._taken(cut)

    def _given_back(self, cut: Cut) -> str:
        """The gradient of a consumer's own examples."""
        if not cut.passes("modulo"):
            return f"{self._entered(cut)}.grad"
        if cut.consumer in self._turned:
            dim = f", dim={cut.spec.batch_dim}" if cut.spec.batch_dim else ""
            return f"torch.cat(d_{cut.name}{dim})"
        return f"d_{cut.name}"

    def _gradient(self, cut: Cut) -> str:
        """The gradient of what the producer made."""
        if cut.passes("slice_batch"):
            return f"d_{cut.name}_group"
        return f"d_{cut.name}" if cut.passes("send") else self._given_back(cut)

    def _returned(self, stage: Stage) -> list[str]:
        return [cut.name for cut in returned_cuts(stage)] + (["loss"] if stage.has_loss else [])

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _body(self, actions: Sequence[Action]) -> list[Line]:
        lines: list[Line] = []
        k = 0
        while k < len(actions):
            action = actions[k]
            if action.role in self._turned and action.verb in _IN_A_TURN:
                run = k
                while run < len(actions) and actions[run].role == action.role and actions[run].verb in _IN_A_TURN:
                    run += 1
                lines += self._loop(
                    action.role, [a for a in actions[k:run] if a.microbatch == actions[run - 1].microbatch]
                )
                k = run
                continue
            lines += self._line(action)
            k += 1
        return lines

    def _loop(self, role: str, actions: Sequence[Action]) -> list[Line]:
        """The actions of a turn, in a loop over the turns."""
        stage = self._stage(role)
        grouping = self._program.plan.groups[role]
        returned = [cut for cut in stage.receives if cut.passes("modulo") and cut.gradient and self._training]
        names = ["losses", *(f"d_{cut.name}" for cut in returned)]
        what = f"1/{grouping.size} of every rank's examples" if grouping.scheme == "B/K" else "one rank's examples"
        adds = "; gradients add up" if self._training and grouping.updates == "once" else ""
        lines = [
            (f"{', '.join(names)} = {', '.join(['[]'] * len(names))}", ""),
            (f"for _ in {self._seat(role)}.turns({grouping.num_microbatches}):", f"{what} in each turn{adds}"),
        ]
        inner = [line for action in actions for line in self._line(action)]
        inner.append(("losses.append(loss.detach())", ""))
        return [*lines, *((f"    {text}", note) for text, note in inner)]

    def _line(self, action: Action) -> list[Line]:
        if action.verb == "sum_loss":
            return self._sum_loss(action)
        seat = self._seat(action.role)
        if action.verb == "all_reduce_tied":
            return (
                [(f"{seat}.all_reduce_tied(stage, TIED)", "over all roles that use them")]
                if action.value == self._first_tied
                else []
            )
        if action.verb in ("send_parameters", "reduce_gradients"):
            what = (
                "parameters, to the workers"
                if action.verb == "send_parameters"
                else "gradients, summed over the workers"
            )
            return [(f"comm.{action.verb}(stage, SERVED)", what)]
        stage = self._stage(action.role)
        if action.verb in ("pull", "forward", "backward", "multiply", "update"):
            return getattr(self, f"_{action.verb}")(stage, seat, action)  # type: ignore[no-any-return]
        if action.verb in ("all_reduce", "push"):
            return []  # part of the backward's lines
        return self._exchange(stage, seat, action)

    def _exchange(self, stage: Stage, seat: str, action: Action) -> list[Line]:
        """A line of what crosses between roles, or within a group."""
        verb, role, cut = action.verb, action.peer, stage.cut(action)
        layout, size = _layout(cut.spec), self._size(cut, stage)
        grad = ".requires_grad_()" if cut.gradient and self._training else ""
        if verb == "send":
            return [(f'{seat}.send({self._sent(cut)}, "{role}"{layout})', f"-> {role}  {size}")]
        if verb == "recv":
            made = "" if cut.passes("modulo") else grad
            return [(f"{self._taken(cut)} = {_recv(seat, cut, role)}{made}", f"<- {role}  {size}")]
        if verb == "modulo":
            return [(f"{cut.name}_group = {seat}.modulo({self._taken(cut)}{layout}){grad}", self._gathers(stage))]
        if verb == "slice_batch":
            return [(f"{cut.name}_own = {seat}.slice_batch({cut.name}{layout})", "this rank's own examples")]
        if verb == "recv_grad":
            return [(f"d_{cut.name} = {_recv(seat, cut, role)}", f"<- {role}  {size}")]
        if verb == "send_grad":
            return [(f'{seat}.send({self._given_back(cut)}, "{role}"{layout})', f"-> {role}  {size}")]
        if verb == "all_gather_grad":
            own = f"d_{cut.name}" if cut.passes("send") else self._given_back(cut)
            return [(f"d_{cut.name}_group = {seat}.all_gather_grad({own}{layout})", "of all ranks of the group")]
        assert verb == "modulo_grad", verb
        partial = "" if cut.partial else ", partial=False"
        call = f"{seat}.modulo_grad({cut.name}_group.grad{layout}{partial})"
        note = "summed over the group, of this rank's examples" if cut.partial else "of this rank's examples"
        return [(f"d_{cut.name}.append({call})" if stage.role in self._turned else f"d_{cut.name} = {call}", note)]

    def _gathers(self, stage: Stage) -> str:
        return "this turn's, of the ranks of the group" if stage.role in self._turned else "of all ranks of the group"

    def _pull(self, stage: Stage, seat: str, action: Action) -> list[Line]:
        layer_wise = self._program.plan.overlap
        note = "parameters begin to arrive" if layer_wise else "parameters arrive"
        return [(f"{seat}.{'start_pulls' if layer_wise else 'pull_all'}(stage, {self._served(stage)})", note)]

    def _forward(self, stage: Stage, seat: str, action: Action) -> list[Line]:
        lines: list[Line] = []
        for cut in stage.receives:
            if self._entered(cut) != self._taken(cut) and not cut.passes("modulo"):
                lines.append((f"{self._entered(cut)} = {self._taken(cut)}.detach().requires_grad_()", ""))
        called = "stage" if len(self.stages) == 1 else f"stage.{method_name(stage)}"
        call = f"{called}({', '.join([seat, *forward_inputs(stage), *map(self._entered, stage.receives)])})"
        returned = self._returned(stage)
        line = f"{', '.join(returned)} = {call}" if returned else call
        if self._program.autocast is None:
            return [*lines, (line, "")]
        return [*lines, (f"with {seat}.autocast({self._program.autocast}):", ""), (f"    {line}", "")]

    def _sum_loss(self, action: Action) -> list[Line]:
        if self._program.plan.world == 1:
            return []
        stage = next((stage for stage in self.stages if stage.has_loss), None)
        if stage is None:
            seat = self._seat(action.role) if action.role != SERVER else "comm"
            role = "role" if len(self._seats()) == 1 else "rank"
            return [(f"total = {seat}.sum_loss({zero_text(self._program)})", f"this {role} adds nothing to the loss")]
        loss = "sum(losses)" if stage.role in self._turned else "loss"
        return [(f"total = {self._seat(stage.role)}.sum_loss({loss})", "the global loss, the same on every rank")]

    def _backward(self, stage: Stage, seat: str, action: Action) -> list[Line]:
        pairs = [(cut.name, self._gradient(cut)) for cut in returned_cuts(stage) if cut.gradient]
        if stage.has_loss:
            pairs.append(("loss", ""))
        if len(pairs) == 1:
            call = f"{pairs[0][0]}.backward({pairs[0][1]})"
        else:
            values, grads = (", ".join(pair[k] or "None" for pair in pairs) for k in (0, 1))
            call = f"torch.autograd.backward(({values}), ({grads}))"
        around, notes = [], []
        if stage.buckets:
            around.append(f"{seat}.all_reduce(stage, {buckets_name(self._part, stage)})")
            notes.append(f"{self._buckets(stage, stage.buckets)}, summed {self._when(stage)}")
        after: list[Line] = []
        if stage.served and self._program.plan.overlap:
            around.append(f"{seat}.push(stage, {self._served(stage)})")
            notes.append(f"{self._buckets(stage, stage.served)}, pushed while backward runs")
        elif stage.served:
            after.append((f"{seat}.push_all(stage, {self._served(stage)})", self._buckets(stage, stage.served)))
        if not around:
            return [(call, ""), *after]
        return [(f"with {', '.join(around)}:", "; ".join(notes)), (f"    {call}", ""), *after]

    def _when(self, stage: Stage) -> str:
        once = self._program.plan.groups[stage.role].updates == "once" if stage.role in self._turned else False
        return "in the last turn" if once else "while backward runs"

    def _buckets(self, stage: Stage, buckets: Sequence[Sequence[str]]) -> str:
        total = units.nbytes(sum(bucket_nbytes(self._program, stage, bucket) for bucket in buckets))
        return f"{total} in {len(buckets)} bucket{'s' if len(buckets) > 1 else ''}"

    def _multiply(self, stage: Stage, seat: str, action: Action) -> list[Line]:
        return [(f"{seat}.multiply()", "late-multiplied gradients: W' = E^T X, of all ranks")]

    def _update(self, stage: Stage, seat: str, action: Action) -> list[Line]:
        return [(f"{seat}.update()", "of this role's parameters, in every turn: not what one process does")]

    def _return_loss(self) -> str:
        return "return loss.detach()" if self._program.plan.world == 1 else "return total.wait()"

    def _served(self, stage: Stage) -> str:
        return f'SERVED["{stage.role}"]'

    def _size(self, cut: Cut, stage: Stage) -> str:
        batch = batch_of(self._program, self._part, stage)
        if batch is None:
            return f"{units.nbytes(cut.spec.nbytes(1))} an example"
        return units.nbytes(cut.spec.nbytes(batch))


def batch_of(program: PlacedProgram, part: RankProgram, stage: Stage) -> int | None:
    """Examples that each rank of the part has of its own in a role; None where they differ."""
    batches = {program.plan.batch(stage.role, rank) for rank in part.ranks}
    return batches.pop() if len(batches) == 1 else None


def _recv(seat: str, cut: Cut, role: str) -> str:
    rows = f", rows={cut.spec.rows}" if cut.spec.rows != 1 else ""
    return f'{seat}.recv("{role}", {cut.spec.template()}, {cut.spec.dtype}{rows})'


def _layout(spec: TensorSpec) -> str:
    parts = ([f"dim={spec.batch_dim}"] if spec.batch_dim else []) + ([f"rows={spec.rows}"] if spec.rows != 1 else [])
    return "".join(f", {part}" for part in parts)


def zero_text(program: Program) -> str:
    """A loss of nothing, in the loss's own dtype."""
    dtype = program.loss.meta["spec"].dtype
    return "torch.zeros(())" if str(dtype) == "torch.float32" else f"torch.zeros((), dtype={dtype})"
