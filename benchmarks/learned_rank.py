"""A rank of `benchmarks.learned`: one of a session that records what it trains."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.session_rank import SessionRank, serve, sgd
from splitc.cost_models.calibration.record import seen_in
from splitc.runtime.launch.failures import guarded
from splitc.runtime.launch.feed import synthetic
from splitc.runtime.launch.main import load_worker
from splitc.runtime.transport.recorder import Recorder


class LearnedRank(SessionRank):
    """Trains builds on a recorder too."""

    def measure(self, folder: str, steps: int, warm_up: int) -> dict[str, Any]:
        """Train a build, and return what was seen of the steps that count: on rank 0, as data."""
        recorder = Recorder(self._transport)
        worker = load_worker(Path(folder), recorder, sgd)
        batch = next(synthetic(worker.rank.spec))
        recorder.align()
        for _ in range(warm_up + steps):
            worker.step(*batch)
        ranks = self._transport.gather_objects(recorder.steps[warm_up:])
        return {} if ranks is None else asdict(seen_in(ranks))


if __name__ == "__main__":
    guarded(lambda: serve(LearnedRank))
