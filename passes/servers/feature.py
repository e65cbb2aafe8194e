"""Parameters on servers, in the passes."""

from __future__ import annotations

from dataclasses import replace

from splitc.ir.program import LoweredProgram
from splitc.passes.features import Feature
from splitc.passes.servers.insert_pulls import InsertPulls


class Servers(Feature):
    """Pulls in the stages of workers."""

    with_buckets = (InsertPulls(),)

    def beside(self, program: LoweredProgram, lowered: LoweredProgram) -> LoweredProgram:
        served = {stage.role: stage.served for stage in program.stages}
        stages = tuple(replace(stage, served=served.get(stage.role, ())) for stage in lowered.stages)
        return InsertPulls().run(replace(lowered, stages=stages))


FEATURE = Servers()
