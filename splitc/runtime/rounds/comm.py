"""What generated code calls at the beginning and at the end of a round, and between its updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..comm.role import Part
from .averaging import Averages
from .late import LateAverages

Buckets = Sequence[Sequence[str]]


class RoundComm(Part):
    """A role's exchanges with other units."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.averages = Averages(self.role)

    def keep(self, stage: nn.Module, buckets: Buckets, fragments: Sequence[int] = (), **rule: Any) -> None:
        """Keep the parameters that the outer optimizer is to update by the averaged change of the round.

        fragments: of the buckets, where units may be late.  rule: lr, momentum and nesterov.
        """
        self.averages.keep(tensors := _tensors(stage, buckets), **rule)
        if isinstance(self.averages, LateAverages):
            self.averages.open(tensors, fragments)

    def average(self, stage: nn.Module, buckets: Buckets, fragment: int = 0, optimizer: bool = False) -> None:
        """Average parameters, and statistics of normalisations, over all units, weighted by their examples.

        What travels arrives first; what was not trained since is not averaged again.
        optimizer: the floating state of their optimizer too.
        """
        share, values = self.role.context.shares[fragment], _tensors(stage, buckets)
        if optimizer:
            states = ([self._floating_state(tensor) for tensor in bucket] for bucket in values)
            values += [[value for found in bucket for value in found] for bucket in states]
        self.averages.join([each for each in values if each], fragment, share)

    def start_average(self, stage: nn.Module, buckets: Buckets, fragment: int = 0, mixing: float | None = None) -> None:
        """Start to average a fragment, which `arrive` waits for some updates later."""
        self.averages.start(_tensors(stage, buckets), fragment, self.role.context.shares[fragment], mixing)

    def arrive(self, fragment: int) -> None:
        """Wait for a fragment, and join it with what this rank trained meanwhile."""
        self.averages.arrive(fragment)

    def _floating_state(self, tensor: Tensor) -> list[Tensor]:
        """The optimizer's state of a tensor but for counters."""
        state = self.role.optimizer_state(tensor) if isinstance(tensor, nn.Parameter) else {}
        found = (value for _, value in sorted(state.items(), key=lambda item: item[0]))
        return [value for value in found if isinstance(value, Tensor) and value.shape == tensor.shape]


def _tensors(stage: nn.Module, buckets: Buckets) -> list[list[Tensor]]:
    tensors = {**dict(stage.named_parameters(remove_duplicate=False)), **dict(stage.named_buffers())}
    return [[tensors[name] for name in names] for names in buckets]
