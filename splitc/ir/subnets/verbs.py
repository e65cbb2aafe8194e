"""How the slices of a round come to ranks, and back to those that own them."""

from __future__ import annotations

from splitc.ir.schedule.verb import Among, Verb, When
from splitc.ir.wire_op import What

VERBS = {
    "deal": Verb("before a round, gather the slices of parameters that this rank is dealt",
        when=When.BEFORE_ROUND, among=Among.OWN, what=What.DEAL, before=("forward",)),
    "fetch_ahead": Verb("during a round, gather of the next slices what no rank trains in this one",
        when=When.BEFORE_ROUND, among=Among.OWN, what=What.FETCH_AHEAD, after=("deal",), before=("forward",),
        lands="deal"),
    "collect": Verb("after a round, return them to the ranks that own them",
        when=When.AFTER_ROUND, among=Among.OWN, what=What.COLLECT, after=("backward",)),
}  # fmt: skip
