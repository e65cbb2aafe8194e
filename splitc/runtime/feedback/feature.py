"""The residuals of a rank's sums of gradients, which a checkpoint keeps.

Under another plan they begin at zero again: what a rank had not yet sent of a single step is lost once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..comm.gradients import GradientComm
from ..moments import Feature
from ..spec import RankSpec
from ..transport.formats import FORMATS
from ..transport.short import Short


class ErrorFeedback(Feature):
    """What the transports of gradients of a rank's roles keep from step to step."""

    item = "residuals"

    @staticmethod
    def concerns(spec: RankSpec) -> bool:
        return spec.wire.gradients in FORMATS and FORMATS[spec.wire.gradients].feeds_back

    @property
    def _carrying(self) -> list[Short]:
        return [part.role.short["gradients"] for part in self.training.parts(GradientComm)]

    def forget(self) -> None:
        for each in self._carrying:
            each.residuals.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"roles": [each.residuals for each in self._carrying]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for each, saved in zip(self._carrying, state["roles"], strict=True):
            each.residuals = {name: residual.to(each.device) for name, residual in saved.items()}
