"""The residuals of a rank's sums of gradients, and of what it changed in rounds, which a checkpoint keeps.

Under another plan they begin at zero again: what a rank had not yet sent of a single step is lost once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..comm.sums import GradientComm
from ..moments import Feature
from ..spec import RankSpec
from ..transport.formats import FORMATS
from ..transport.short import Short


class ErrorFeedback(Feature):
    """What the transports of these sums of a rank's roles keep from one to the next."""

    item = "residuals"

    @staticmethod
    def concerns(spec: RankSpec) -> bool:
        return bool(_kinds(spec))

    @property
    def _carrying(self) -> list[Short]:
        parts, kinds = self.training.parts(GradientComm), _kinds(self.training.spec)
        return [part.role.short[kind] for part in parts for kind in kinds]

    def forget(self) -> None:
        for each in self._carrying:
            each.residuals.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"roles": [each.residuals for each in self._carrying]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for each, saved in zip(self._carrying, state["roles"], strict=True):
            each.residuals = {name: residual.to(each.device) for name, residual in saved.items()}


def _kinds(spec: RankSpec) -> list[str]:
    """The kinds of payloads whose format feeds back, of those that are summed."""
    kinds = ("gradients", *("averages",) * (spec.rounds is not None))
    return [kind for kind in kinds if (form := FORMATS.get(getattr(spec.wire, kind))) and form.feeds_back]
