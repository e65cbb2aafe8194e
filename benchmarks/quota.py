"""A share of the processor for each rank, by the cpu controller of control groups, version 1 or 2.

Under a quota the ranks of a testbed compute like machines of their own, as slow ones, instead of lending each other the
time that one of them waits for the network.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.layout import PREFIX

PERIOD = 0.01  # seconds; a short one, so that a rank never stands still for long


@dataclass(frozen=True)
class Controller:
    """Where groups are made.  root: the folder of the cpu controller.  version: 1 or 2."""

    root: Path
    version: int

    def make(self, name: str, cpus: float) -> Path:
        """A group whose processes have `cpus` of a processor between them."""
        period, group = round(PERIOD * 1e6), self.root / name
        if self.version == 2 and "cpu" not in (self.root / "cgroup.subtree_control").read_text().split():
            (self.root / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
        if self.version == 2:
            (group / "cpu.max").write_text(f"{round(cpus * period)} {period}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(round(cpus * period)))
        return group

    def names(self) -> list[str]:
        """The groups that testbeds have made."""
        return [path.name for path in self.root.glob(f"{PREFIX}-*") if path.is_dir()]


def find_controller(mounts: str) -> Controller:
    """The cpu controller among the lines of /proc/mounts.  Raises BenchmarkError that says why there is none."""
    unified = None
    for line in mounts.splitlines():
        _, place, kind, options = line.split()[:4]
        if kind == "cgroup" and "cpu" in options.split(","):
            return Controller(Path(place), 1)
        if kind == "cgroup2":
            unified = Path(place)
    if unified is None:
        raise BenchmarkError("no CPU quota is possible here: no control groups are mounted; leave the quota out")
    if "cpu" not in (unified / "cgroup.controllers").read_text().split():
        raise BenchmarkError(f"no CPU quota is possible here: {unified} has no cpu controller; leave the quota out")
    return Controller(unified, 2)


def make_quotas(names: list[str], cpus: list[float]) -> list[Path]:
    """A group for each rank.  Raises BenchmarkError, and leaves no group behind, when this machine cannot."""
    controller = find_controller(Path("/proc/mounts").read_text())
    made: list[Path] = []
    try:
        for name, share in zip(names, cpus, strict=True):
            made.append(controller.make(name, share))
    except OSError as error:
        for name in names:
            with contextlib.suppress(OSError):  # the one that failed may be there, or not
                (controller.root / name).rmdir()
        raise BenchmarkError(
            f"no CPU quota is possible here: {error.strerror}: {error.filename}; leave the quota out"
        ) from error
    return made


def groups() -> dict[str, Path]:
    """All groups that testbeds have made, by name; none where there is no controller."""
    with contextlib.suppress(BenchmarkError, OSError):
        controller = find_controller(Path("/proc/mounts").read_text())
        return {name: controller.root / name for name in controller.names()}
    return {}
