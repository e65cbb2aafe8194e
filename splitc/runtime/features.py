"""The features of training that are registered; without its line here and its folder a feature is gone."""

from __future__ import annotations

from .feedback.feature import ErrorFeedback
from .late_multiply.feature import LateMultiplied
from .moments import Feature
from .rounds.feature import InRounds
from .servers.feature import OnServers
from .subnets.feature import Subnetworks

FEATURES: tuple[type[Feature], ...] = (
    Subnetworks,
    InRounds,
    OnServers,
    LateMultiplied,
    ErrorFeedback,
)
