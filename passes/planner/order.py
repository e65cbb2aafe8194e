"""In which order a step's batch goes through the roles: at once, or in microbatches."""

from __future__ import annotations

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
        return plan if self.pieces == 1 else plan.ordered(*self)


AT_ONCE = Order()
