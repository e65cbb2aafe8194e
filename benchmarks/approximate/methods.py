"""The methods that are compared, by the name that tables and the command line use."""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 4  # steps before the first evaluation
GROWTH = 1.3  # of the steps from one evaluation to the next, so that early and late accuracies are as well resolved


@dataclass(frozen=True)
class Method:
    """A way to train.

    family: the methods that share a learning rate.  strategy: splitc's; None is torch's DistributedDataParallel.
    period: local steps of a round.  repeated: with all seeds of a task; else with the first alone.
    """

    name: str
    family: str
    strategy: str | None
    period: int = 1
    repeated: bool = False

    def evaluations(self, steps: int) -> list[int]:
        """After how many steps a curve of `steps` is evaluated: between rounds, `GROWTH` apart, and at the end."""
        found, due = list[int](), float(FIRST)
        for step in range(self.period, steps, self.period):
            if step >= due:
                found.append(step)
                due = step * GROWTH
        return [*found, steps]


def _local_sgd(period: int) -> Method:
    return Method(f"local_sgd {period}", "local_sgd", f"local_sgd(period={period})", period)


def _ist(steps: int) -> Method:
    return Method(f"ist {steps}", "ist", f"independent_subnets(local_steps={steps})", steps, repeated=steps > 1)


_ALL = (
    Method("ddp", "data_parallel", None, repeated=True),
    Method("auto", "data_parallel", "auto"),
    *map(_local_sgd, (4, 16)),
    *map(_ist, (1, 4, 8, 16, 64)),
)
METHODS = {method.name: method for method in _ALL}
