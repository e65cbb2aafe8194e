"""What generated code calls at the beginning and at the end of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ..spec import DealtDims, RoleSpec, StepContext
from ..transport.messages import Messages
from .averaging import average
from .subnets import State, Subnets


class RoundComm:
    """A rank's exchanges with other units; a `RoleComm` says in which role.

    optimizer_state: gives the state of a parameter; a worker with an optimizer puts its own in place.
    """

    _spec: RoleSpec
    _messages: Messages
    _context: StepContext
    _subnets: dict[nn.Module, Subnets]
    optimizer_state: State

    def deal(self, stage: nn.Module, dealt: Mapping[str, DealtDims]) -> None:
        """Gather this rank's slices of dealt tensors from the ranks that own them."""
        if stage not in self._subnets:
            state = self.optimizer_state
            own = self._spec.shards
            self._subnets[stage] = Subnets(self._messages, stage, dealt, own, self._spec.averaged, state)
        self._subnets[stage].gather(self._context.seed, self._context.round)

    def collect(self, stage: nn.Module, dealt: Mapping[str, DealtDims]) -> None:
        """Return the slices of dealt tensors to the ranks that own them."""
        self._subnets[stage].give_back(self._context.share)

    def average(self, stage: nn.Module, buckets: Sequence[Sequence[str]], optimizer: bool = False) -> None:
        """Average parameters, and statistics of normalisations, over all units, weighted by the round's examples.

        optimizer: the floating state of their optimizer too.
        """
        tensors = {**dict(stage.named_parameters(remove_duplicate=False)), **dict(stage.named_buffers())}
        values = [[tensors[name].detach() for name in names] for names in buckets]
        if optimizer:
            states = ([self._floating_state(tensors[name]) for name in names] for names in buckets)
            values += [[value for found in bucket for value in found] for bucket in states]
        average(self._messages, [each for each in values if each], self._spec.averaged, self._context.share)

    def _floating_state(self, tensor: Tensor) -> list[Tensor]:
        """The optimizer's state of a tensor but for counters."""
        state = self.optimizer_state(tensor) if isinstance(tensor, nn.Parameter) else {}
        found = (value for _, value in sorted(state.items(), key=lambda item: item[0]))
        return [value for value in found if isinstance(value, Tensor) and value.shape == tensor.shape]
