"""In which order a step's batch goes through the roles: at once, or in microbatches."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from splitc.ir.plan import Plan


class Order(NamedTuple):
    """pieces: in how many microbatches.  schedule: of forward and backward, as of a plan."""

    pieces: int = 1
    schedule: str = "all_forward"

    def live(self, batch: int, later: int) -> int:
        """The most of `batch` examples whose activations a rank keeps at once, with `later` roles after its own."""
        pieces = min(later + 1, self.pieces) if self.schedule == "1f1b" or not later else self.pieces
        return min(batch, -(-batch // self.pieces) * pieces)

    def of(self, plan: Plan) -> Plan:
        """The plan in this order, in place of the pieces of its groups; as it is where nothing was asked for."""
        if self.pieces == 1:
            return plan
        groups = {role: replace(group, scheme="BK") for role, group in plan.groups.items()}
        return replace(plan, groups=groups, microbatches=self.pieces, schedule=self.schedule)


AT_ONCE = Order()
