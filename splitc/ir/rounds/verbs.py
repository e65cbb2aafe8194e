"""What ranks do at the ends of a round, and between its updates."""

from __future__ import annotations

from splitc.ir.schedule.verb import Among, Verb, When
from splitc.ir.wire_op import What

VERBS = {
    "keep": Verb("before a round, keep the parameters that the outer optimizer updates after it",
        when=When.BEFORE_ROUND, after=("backward",)),
    "average": Verb("after a round, average a bucket of parameters over the units that trained them",
        when=When.AFTER_ROUND, among=Among.OWN, what=What.AVERAGE, after=("backward",), buckets="averaged",
        lands="arrive"),
    "arrive": Verb("wait for a bucket that was on its way during updates",
        when=When.AFTER_ROUND, after=("backward",), buckets="averaged"),
}  # fmt: skip
