"""What generated code calls at the beginning and at the end of a round."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..spec import RoleSpec, StepContext
from ..transport.messages import Messages
from .averaging import average


class RoundComm:
    """A rank's exchanges with other units; a `RoleComm` says in which role."""

    _spec: RoleSpec
    _messages: Messages
    _context: StepContext

    def average(self, stage: nn.Module, buckets: Sequence[Sequence[str]]) -> None:
        """Average parameters, and statistics of normalisations, over all units, weighted by the round's examples."""
        average(self._messages, stage, buckets, self._spec.averaged, self._context.share)
