"""Write the lines of a step that move a cut, or its gradient, between roles or within a group."""

from __future__ import annotations

from collections.abc import Collection

from splitc import units
from splitc.codegen.layout import Line
from splitc.codegen.stage import variables
from splitc.errors import InternalError
from splitc.ir.actions import Action, RankProgram
from splitc.ir.constructors import literal
from splitc.ir.plan import SERVER
from splitc.ir.program import Cut, LoweredProgram, PlacedProgram, Stage, TensorSpec
from splitc.ir.transitions import COLLECTIVES, options_of
from splitc.runtime.collectives.layouts import Move, State, Transition


class CutLines:
    """The variables that hold a cut on its way, and the lines that move it.

    microbatched: the roles that run their stage once for each of several microbatches.
    """

    def __init__(
        self, program: LoweredProgram, rank_program: RankProgram, training: bool, microbatched: Collection[str]
    ) -> None:
        self._program, self._rank_program = program, rank_program
        self._training, self._microbatched = training, microbatched
        self.comms = [role for role in rank_program.roles if role != SERVER] or [SERVER]

    def comm(self, role: str) -> str:
        """The variable of a role's communicator."""
        return "comm" if len(self.comms) == 1 else role

    # -- variables -----------------------------------------------------------------------------------------------------

    def produced(self, cut: Cut) -> str:
        """The producer's own examples of a cut, or the input that it passes on."""
        stage = self._program.stage(cut.producer)
        if cut.value in stage.inputs:
            names = {str(n.target): name for n, name in variables(stage.graph).items() if n.op == "placeholder"}
            return names[cut.value]
        return cut.name

    def received(self, cut: Cut) -> str:
        """The consumer's own examples of a cut."""
        if not cut.sent:
            return self.produced(cut)
        return cut.name if len(self.comms) == 1 else f"{cut.name}_{cut.consumer}"

    def stage_input(self, cut: Cut) -> str:
        """What the consumer's stage reads."""
        if cut.entry is not None:
            return f"{cut.name}_group"
        if not cut.sent and cut.gradient and self._training:
            return f"{cut.name}_{cut.consumer}"
        return self.received(cut)

    def input_gradient(self, cut: Cut) -> str:
        """The gradient of the consumer's own examples."""
        if cut.entry is None:
            return f"{self.stage_input(cut)}.grad"
        if cut.consumer in self._microbatched:
            return f"torch.cat(d_{cut.name}{f', dim={cut.spec.batch_dim}' if cut.spec.batch_dim else ''})"
        return f"d_{cut.name}"

    def output_gradient(self, cut: Cut) -> str:
        """The gradient of what the producer's stage returns."""
        return f"d_{cut.name}" if cut.sent else self.input_gradient(cut)

    # -- lines ---------------------------------------------------------------------------------------------------------

    def line(self, stage: Stage, action: Action) -> Line:
        """The line of an action that moves a cut of `stage`."""
        role, cut, comm = action.peer, stage.cut(action), self.comm(action.role)
        layout, size = _layout(cut.spec), self._size(cut, stage)
        leaf = ".requires_grad_()" if cut.gradient and self._training else ""
        match action.verb:
            case "send":
                return f'{comm}.send({self._sent(cut)}, "{role}"{layout})', f"-> {role}  {size}"
            case "recv":
                call = _recv(comm, cut, role) + ("" if cut.entry is not None else leaf)
                return f"{self.received(cut)} = {call}", f"<- {role}  {size}"
            case "recv_grad":
                return f"d_{cut.name} = {_recv(comm, cut, role)}", f"<- {role}  {size}"
            case "send_grad":
                return f'{comm}.send({self.input_gradient(cut)}, "{role}"{layout})', f"-> {role}  {size}"
            case "modulo" | "all_to_all":
                return self._entry(stage, cut, comm)
            case "modulo_grad" | "all_to_all_grad":
                return self._entry_grad(stage, cut, comm)
        raise InternalError(f"no line for the action {action}")

    def _entry(self, stage: Stage, cut: Cut, comm: str) -> Line:
        assert cut.entry is not None
        is_made = not cut.sent and cut.gradient and self._training
        value = self.received(cut) + (".detach()" if is_made else "")
        if stage.role in self._microbatched:
            value = f"{comm}.piece({value}{_layout(cut.spec)})"
        leaf = ".requires_grad_()" if cut.gradient and self._training else ""
        what = "a microbatch" if stage.role in self._microbatched else "the examples"
        note = f"all-gather: {what} of all ranks of the group" if cut.entry.move is Move.GATHER else str(cut.entry)
        without = Transition(cut.entry.source, State.DIVIDED) if cut.entry.move is Move.GATHER else cut.entry
        return f"{cut.name}_group = {_moved(comm, value, cut.spec, without)}{leaf}", note

    def _entry_grad(self, stage: Stage, cut: Cut, comm: str) -> Line:
        assert cut.entry is not None
        call = _moved(comm, f"{cut.name}_group.grad", cut.spec, cut.entry.adjoint)
        move = cut.entry.adjoint.move
        note = (
            "this rank's own examples"
            if move is Move.SLICE
            else f"{COLLECTIVES[move]} over the group".replace("_", "-")
        )
        return (f"d_{cut.name}.append({call})" if stage.role in self._microbatched else f"d_{cut.name} = {call}"), note

    def _sent(self, cut: Cut) -> str:
        """A cut in the dtype that its receiver expects: which operations autocast casts differs between devices."""
        source = self.produced(cut)
        is_made = cut.spec.dtype.is_floating_point and cut.value not in self._program.stage(cut.producer).inputs
        return f"{source}.to({cut.spec.dtype})" if self._program.autocast is not None and is_made else source

    def _size(self, cut: Cut, stage: Stage) -> str:
        batch = common_batch(self._program, self._rank_program, stage)
        if batch is None:
            return f"{units.nbytes(cut.spec.nbytes(1))} an example"
        return units.nbytes(cut.spec.nbytes(batch))


def common_batch(program: PlacedProgram, rank_program: RankProgram, stage: Stage) -> int | None:
    """Examples that each rank of `rank_program` has in a role; None where they differ."""
    batches = {program.plan.batch(stage.role, rank) for rank in rank_program.ranks}
    return batches.pop() if len(batches) == 1 else None


def _recv(comm: str, cut: Cut, role: str) -> str:
    rows = f", rows={cut.spec.rows}" if cut.spec.rows != 1 else ""
    return f'{comm}.recv("{role}", {cut.spec.template()}, {cut.spec.dtype}{rows})'


def _moved(comm: str, value: str, spec: TensorSpec, transition: Transition) -> str:
    """The call that brings a value to another state."""
    function, options = options_of(transition, spec.shape[-1], spec.batch_dim or 0, spec.rows)
    given = "".join(f", {key}={literal(option)}" for key, option in options.items())
    return f"{comm}.{function.__name__}({value}{given})"


def _layout(spec: TensorSpec) -> str:
    """The arguments that describe where the examples lie in a tensor."""
    dim = f", dim={spec.batch_dim}" if spec.batch_dim else ""
    return dim + (f", rows={spec.rows}" if spec.rows != 1 else "")
