"""What generated code calls at the beginning and at the end of a round, and between its updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ..spec import DealtDims, RoleSpec, StepContext
from ..transport.base import Transport
from .averaging import Averages
from .subnets import State, Subnets

Buckets = Sequence[Sequence[str]]


class RoundComm:
    """A rank's exchanges with other units; a `RoleComm` says in which role.

    optimizer_state: gives the state of a parameter; a worker with an optimizer puts its own in place.
    """

    _spec: RoleSpec
    _transport: Transport
    _context: StepContext
    _subnets: dict[nn.Module, Subnets]
    averages: Averages
    optimizer_state: State

    def deal(self, stage: nn.Module, dealt: Mapping[str, DealtDims]) -> None:
        """Gather this rank's slices of dealt tensors from the ranks that own them."""
        if stage not in self._subnets:
            state = self.optimizer_state
            own = self._spec.shards
            self._subnets[stage] = Subnets(self._transport, stage, dealt, own, self._spec.averaged, state)
        self._subnets[stage].gather(self._context.seed, self._context.round)

    def fetch_ahead(self, stage: nn.Module, dealt: Mapping[str, DealtDims]) -> None:
        """Start to gather what the slices of the next round have and no rank trains in this one."""
        self._subnets[stage].fetch_ahead(self._context.seed, self._context.round + 1)

    def forget_ahead(self) -> None:
        """Forget what was fetched ahead, since parameters or their state are overwritten.  On every rank."""
        for subnets in self._subnets.values():
            subnets.forget_ahead()

    def collect(self, stage: nn.Module, dealt: Mapping[str, DealtDims]) -> None:
        """Return the slices of dealt tensors to the ranks that own them."""
        self._subnets[stage].give_back(self._context.shares[0])

    def keep(self, stage: nn.Module, buckets: Buckets, lr: float, momentum: float, nesterov: bool) -> None:
        """Keep the parameters that the outer optimizer is to update by the averaged change of the round."""
        self.averages.keep([tensor for bucket in _tensors(stage, buckets) for tensor in bucket], lr, momentum, nesterov)

    def average(self, stage: nn.Module, buckets: Buckets, fragment: int = 0, optimizer: bool = False) -> None:
        """Average parameters, and statistics of normalisations, over all units, weighted by their examples.

        What travels arrives first; what was not trained since is not averaged again.
        optimizer: the floating state of their optimizer too.
        """
        share, values = self._context.shares[fragment], _tensors(stage, buckets)
        if optimizer:
            states = ([self._floating_state(tensor) for tensor in bucket] for bucket in values)
            values += [[value for found in bucket for value in found] for bucket in states]
        self.averages.arrive(fragment, whole=not share)
        if share:
            self.averages.start([each for each in values if each], fragment, share)
            self.averages.arrive(fragment)

    def start_average(self, stage: nn.Module, buckets: Buckets, fragment: int = 0, mixing: float = 0.0) -> None:
        """Start to average a fragment, which `arrive` waits for some updates later."""
        self.averages.start(_tensors(stage, buckets), fragment, self._context.shares[fragment], mixing)

    def arrive(self, fragment: int) -> None:
        """Wait for a fragment, and mix it with this rank's parameters."""
        self.averages.arrive(fragment)

    def _floating_state(self, tensor: Tensor) -> list[Tensor]:
        """The optimizer's state of a tensor but for counters."""
        state = self.optimizer_state(tensor) if isinstance(tensor, nn.Parameter) else {}
        found = (value for _, value in sorted(state.items(), key=lambda item: item[0]))
        return [value for value in found if isinstance(value, Tensor) and value.shape == tensor.shape]


def _tensors(stage: nn.Module, buckets: Buckets) -> list[list[Tensor]]:
    tensors = {**dict(stage.named_parameters(remove_duplicate=False)), **dict(stage.named_buffers())}
    return [[tensors[name] for name in names] for names in buckets]
