"""What a feature of training adds to the passes."""

from __future__ import annotations

from functools import cache, reduce
from typing import ClassVar

from splitc.features import parts
from splitc.ir.pass_manager import Pass
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram


class Feature:
    """A feature's passes.  on_stages: those before gradients are put into buckets; with_buckets: those after it.

    needed: why there must be an evaluation by another plan.
    """

    on_stages: ClassVar[tuple[Pass[LoweredProgram, LoweredProgram], ...]] = ()
    with_buckets: ClassVar[tuple[Pass[LoweredProgram, LoweredProgram], ...]] = ()

    needed: ClassVar[str] = ""

    def evaluated(self, plan: Plan) -> Plan:
        """The plan by which the model is evaluated."""
        return plan

    def beside(self, program: LoweredProgram, lowered: LoweredProgram) -> LoweredProgram:
        """What is computed without gradients, of the parameters that `program` trains."""
        return lowered


def plan_of(plan: Plan) -> Plan:
    """The plan by which the model is evaluated: the same, but where a feature trains parts of it."""
    return reduce(lambda plan, feature: feature.evaluated(plan), features(), plan)


@cache
def features() -> tuple[Feature, ...]:
    """Those of the registry."""
    return tuple(part.FEATURE for part in parts("splitc.passes", "feature"))
