"""Write the lines of a step that move a cut, or its gradient, between roles or within a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from splitc import units
from splitc.codegen.layout import Line
from splitc.codegen.stage_names import receiving, variables
from splitc.ir.constructors import literal
from splitc.ir.program import Cut, LoweredProgram, PlacedProgram, Stage, TensorSpec
from splitc.ir.schedule.actions import Action, RankProgram
from splitc.ir.transitions import options_of
from splitc.ir.wire import of_action
from splitc.ir.wire_op import What
from splitc.runtime.collectives.layouts import Move, State, Transition


@dataclass(frozen=True)
class Comm:
    """The communicator that a line uses.  each: that of the microbatch, `comm[k]`.  errors: of what goes back."""

    name: str
    each: bool
    errors: bool = False

    def __str__(self) -> str:
        return f"{self.name}{'[k]' * self.each}{'.errors' * self.errors}"


class CutLines:
    """The variables of a function that hold a cut on its way, and the lines that move it.

    Where gradients go back and a rank's roles run their stage once for each of several microbatches, values that one
    action leaves to a later one are kept by microbatch: `cut0[k]`.

    name: of the function; "step" trains, others run one batch as a whole, forward.  _waits: whether its loss does.
    trained: of "predict", the roles of the rank in training, whose `Stage` and communicators it uses.
    """

    def __init__(
        self, program: LoweredProgram, rank_program: RankProgram, name: str = "step", trained: Sequence[str] = ()
    ) -> None:
        self.program, self.rank_program, self._name = program, rank_program, name
        self._plan, self._training, self._predicts = program.plan, name == "step", name == "predict"
        self.stages = program.stages_of(rank_program)
        self._microbatched = {stage.role for stage in self.stages if self._training and program.turns(stage) > 1}
        self._in_pieces = bool(self._microbatched) and self._plan.in_pieces
        roles = trained if self._predicts else [role for role in rank_program.roles if role in self._plan.roles]
        readers = set(rank_program.roles) & set(receiving(program)) if self._predicts else ()
        self._alone, self._comms = len(roles) == 1, [*(roles or rank_program.roles), *readers]
        self._tables: dict[str, str] = {}  # what is kept by microbatch, and its value at first
        lossy = {stage.role for stage in self.stages if stage.has_loss}
        follows = pairwise(rank_program.actions)  # a receive may stand between, where the stage communicates
        self._waits = any(a.verb == "forward" and a.role in lossy and b.verb != "backward" for a, b in follows)

    def comm(self, role: str) -> str:
        """The variable of a role's communicator."""
        return "comm" if len(self._comms) == 1 else role

    def part(self, action: Action) -> Comm:
        """The communicator of an action: that of its microbatch, or of the whole batch."""
        wire, moves_back = self._plan.wire, action.row.moves_cut and action.row.backward
        return Comm(self.comm(action.role), self._repeats(action), moves_back and wire.errors != wire.activations)

    def _repeats(self, action: Action) -> bool:
        """Whether an action is done once for each microbatch."""
        return action.role in self._microbatched and self.program.repeats(action)

    def _is_early_entry(self, action: Action) -> bool:
        """Whether a group begins to take a cut that was just made."""
        return action.row.what is What.ENTRY and self._is_early(self.program.stage(action.role).cut(action))

    def _is_input(self, cut: Cut) -> bool:
        return cut.value in self.program.stage(cut.producer).inputs

    # -- variables -----------------------------------------------------------------------------------------------------

    def kept(self, name: str, last: bool = False) -> str:
        """A value that a later action uses.  last: nothing uses it after."""
        if not self._in_pieces:
            return name
        self._tables.setdefault(name, "{}")
        return f"{name}.pop(k)" if last else f"{name}[k]"

    def appended(self, name: str, value: str) -> str:
        """The line that adds a value to a list, which the microbatches have together."""
        self._tables.setdefault(name, "[]")
        return f"{name}.append({value})"

    def returned(self, cut: Cut, last: bool = False) -> str:
        """What the producer's stage returns."""
        return self.kept(cut.name, last) if self._returns(cut) or not cut.sent or self._is_parted else cut.name

    @property
    def _is_parted(self) -> bool:
        """Whether a rank receives as one role between what it sends as another, so that these are functions apart."""
        return len(self.rank_program.roles) > 1

    def _returns(self, cut: Cut) -> bool:
        """Whether its gradient comes back in this step."""
        return cut.gradient and self._training

    def produced(self, cut: Cut, last: bool = False) -> str:
        """The producer's own examples of a cut, or the input that it passes on."""
        if self._is_input(cut):
            named = variables(self.program.stage(cut.producer).graph).items()
            return next(name for node, name in named if node.op == "placeholder" and node.target == cut.value)
        return self.returned(cut, last)

    def received(self, cut: Cut, last: bool = False) -> str:
        """The variable of the consumer's own examples of a cut, whole or by microbatch."""
        if not cut.sent:
            return self.produced(cut, last)
        name = cut.name if len(self._comms) == 1 else f"{cut.name}_{cut.consumer}"
        return name if self._is_input(cut) else self.kept(name, last)

    def _arrived(self, cut: Cut, comm: Comm) -> str:
        """The consumer's own examples of a cut in the microbatch."""
        if not self._in_pieces or self._is_input(cut):
            return self.piece(self.received(cut), cut.spec, comm)
        used_later = self._returns(cut) and (not cut.sent or not cut.gathered)
        return self.received(cut, last=not used_later) + ".wait()" * cut.sent

    def piece(self, name: str, spec: TensorSpec, comm: Comm) -> str:
        """The microbatch's part of a value that is there whole."""
        return f"{comm}.piece({name}{_layout(spec)})" if comm.each and spec.batch_dim is not None else name

    def entry(self, cut: Cut, comm: Comm) -> list[Line]:
        """The line that makes of a cut without groups the leaf whose gradient goes back, where one is needed."""
        if self._is_early(cut):
            return [(f"{self.stage_input(cut)} = {self.stage_input(cut)}.wait().requires_grad_()", "")]
        if cut.gathered:
            return []
        name, source = self.stage_input(cut), self.received(cut)
        if self._in_pieces and cut.sent and self._returns(cut):
            return [(f"{name} = {self._arrived(cut, comm)}.requires_grad_()", "")]
        return [] if name == source else [(f"{name} = {source}.detach().requires_grad_()", "")]

    def _is_early(self, cut: Cut) -> bool:
        """Whether a group takes the cut, and gives its gradient back, while it computes on another microbatch."""
        return self._in_pieces and self._training and self.program.enters_early(cut)

    def argument(self, cut: Cut, comm: Comm) -> str:
        """What the call of the consumer's stage is given."""
        if cut.gathered and not self._returns(cut):
            return self.kept(f"{cut.name}_group", last=True)
        return self.stage_input(cut) if self._returns(cut) else self._arrived(cut, comm)

    def stage_input(self, cut: Cut, last: bool = False) -> str:
        """What the consumer's stage reads, where it is a variable of its own."""
        if cut.gathered:
            return self.kept(f"{cut.name}_group", last)
        if not cut.sent and self._returns(cut):
            return self.kept(f"{cut.name}_{cut.consumer}", last)
        return self.received(cut, last)

    def input_gradient(self, cut: Cut) -> str:
        """The gradient of the consumer's own examples."""
        if cut.entry is None:
            return f"{self.stage_input(cut, last=True)}.grad"
        if cut.consumer in self._microbatched and not self._in_pieces:
            return f"torch.cat(d_{cut.name}{f', dim={cut.spec.batch_dim}' if cut.spec.batch_dim else ''})"
        return f"d_{cut.name}_{cut.consumer}" if self._in_pieces and cut.sent else self.kept(f"d_{cut.name}", last=True)

    def output_gradient(self, cut: Cut) -> str:
        """The gradient of what the producer's stage returns."""
        if not cut.sent:
            return self.input_gradient(cut) + ".wait()" * self._is_early(cut)
        return self.kept(f"d_{cut.name}", last=True) + ".wait()" * self._in_pieces

    # -- lines ---------------------------------------------------------------------------------------------------------

    def line(self, stage: Stage, action: Action) -> Line:
        """The line of an action that moves a cut of `stage`."""
        role, cut, comm = action.peer, stage.cut(action), self.part(action)
        layout, size = _layout(cut.spec), self._size(cut, stage, action, comm)
        to, of = (_state(word, cut.travels(backward=word == "of")) for word in ("to", "of"))
        leaf = ".requires_grad_()" if self._returns(cut) else ""
        match action.verb:
            case "send":
                return f'{comm}.send({self._sent(cut)}, "{role}"{layout}{to})', f"-> {role}  {size}"
            case "recv":
                call = _recv(comm, cut, role, to) + ("" if cut.gathered or comm.each else leaf)
                return f"{self.received(cut)} = {call}", f"<- {role}  {size}"
            case "recv_grad":
                return f"{self.kept(f'd_{cut.name}')} = {_recv(comm, cut, role, of)}", f"<- {role}  {size}"
            case "send_grad":
                return f'{comm}.send({self.input_gradient(cut)}, "{role}"{layout}{of})', f"-> {role}  {size}"
        return (self._entry_grad if action.row.backward else self._entry)(cut, comm)

    def _entry(self, cut: Cut, comm: Comm) -> Line:
        assert cut.entry is not None
        value = self._arrived(cut, comm) + (".detach()" if not cut.sent and self._returns(cut) else "")
        write, leaf = (_started, "") if self._is_early(cut) else (_moved, ".requires_grad_()" * self._returns(cut))
        what = "a microbatch" if comm.each else "the examples"
        note = f"all-gather: {what} of all ranks of the group" if cut.entry.move is Move.GATHER else str(cut.entry)
        without = Transition(cut.entry.source, State.DIVIDED) if cut.entry.move is Move.GATHER else cut.entry
        return f"{self.stage_input(cut)} = {write(comm, value, cut.spec, without)}{leaf}", note

    def _entry_grad(self, cut: Cut, comm: Comm) -> Line:
        assert cut.entry is not None
        whole, adjoint = self.stage_input(cut, last=True), cut.entry.adjoint
        write = _started if self._is_early(cut) else _moved
        call = write(comm, f"{whole}.grad", cut.spec, adjoint)
        note = str(adjoint)
        if adjoint.move.communicates:
            note = f"{adjoint.move.collective} over the group".replace("_", "-")
        elif adjoint == (State.REPLICATE, State.BATCH):
            note = "this rank's own examples"
        if comm.each and not self._in_pieces:
            return self.appended(f"d_{cut.name}", call), note
        name = self.input_gradient(cut) if cut.sent else self.kept(f"d_{cut.name}")
        return f"{name} = {call}", note

    def _sent(self, cut: Cut) -> str:
        """A cut in the dtype that its receiver expects: which operations autocast casts differs between devices."""
        source = self.produced(cut, last=self._is_parted and not self._returns(cut))
        is_made = cut.spec.dtype.is_floating_point and not self._is_input(cut)
        return f"{source}.to({cut.spec.dtype})" if self.program.autocast is not None and is_made else source

    def _size(self, cut: Cut, stage: Stage, action: Action, comm: Comm) -> str:
        state = cut.travels(action.row.backward)
        if state is not State.BATCH:
            ranks = self.rank_program.ranks
            sizes = {sum(op.nbytes for op in of_action(self.program, rank, action)) for rank in ranks}
            return f"{'up to ' * (len(sizes) > 1)}{units.nbytes(max(sizes))}{in_state(state)}"
        batch = common_batch(self.program, self.rank_program, stage, in_pieces=comm.each)
        if batch is None:
            return f"{units.nbytes(cut.spec.nbytes(1))} an example"
        return units.nbytes(cut.spec.nbytes(batch))


def common_batch(
    program: PlacedProgram, rank_program: RankProgram, stage: Stage, in_pieces: bool = False
) -> int | None:
    """Examples that each rank of `rank_program` has in a role, of the batch or of each piece; None if they differ."""
    parts = range(program.plan.turns(stage.role)) if in_pieces else [None]
    batches = {program.plan.batch(stage.role, rank, k) for rank in rank_program.ranks for k in parts}
    return batches.pop() if len(batches) == 1 else None


def in_state(state: State) -> str:
    """How notes say in which state of its group the consumer receives a cut."""
    return "" if state is State.BATCH else f" in state {state}"


def _state(word: str, state: State) -> str:
    """The argument that says in which state of its group the consumer has a cut, or its gradient."""
    return "" if state is State.BATCH else f', {word}="{state}"'


def _recv(comm: Comm, cut: Cut, role: str, state: str) -> str:
    rows = f", rows={cut.spec.rows}" if cut.spec.rows != 1 else ""
    verb = "irecv" if comm.each else "recv"
    return f'{comm}.{verb}("{role}", {cut.spec.template()}, {cut.spec.dtype}{rows}{state})'


def _moved(comm: Comm, value: str, spec: TensorSpec, transition: Transition) -> str:
    """The call that brings a value to another state."""
    function, options = options_of(transition, spec.shape[-1], spec.batch_dim or 0, spec.rows)
    given = "".join(f", {key}={literal(option)}" for key, option in options.items())
    return f"{comm}.{function.__name__}({value}{given})"


def _started(comm: Comm, value: str, spec: TensorSpec, transition: Transition) -> str:
    """The call that begins to bring a value to another state."""
    features = f", features={spec.shape[-1]}" if State.FEATURES in transition else ""
    return f'{comm}.start({value}, "{transition.source}", "{transition.target}"{features}{_layout(spec)})'


def _layout(spec: TensorSpec) -> str:
    """The arguments that describe where the examples lie in a tensor."""
    dim = f", dim={spec.batch_dim}" if spec.batch_dim else ""
    return dim + (f", rows={spec.rows}" if spec.rows != 1 else "")
