"""Predictions as plan.json has them."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

from splitc.ir.prediction import PREDICTION_KEYS, Candidate, Later, Prediction, Tried
from splitc.runtime.transport.phases import Phases

PREDICTION = Prediction(
    cluster="toy",
    proof="gap",
    gap=0.02,
    step_seconds=0.5,
    priced=(Candidate("data_parallel", 0.5, 8.0, 4, True, False, "too large", {"all": (0, 1)}),),
    reasons={"fc6": "pinned"},
    layer_seconds={"fc6": 0.1},
    phases=(Phases(0, 0.4, 0.3, 0.1, 0.2, 64.0), Phases(1, 0.6, 0.3, 0.3, 0.2, 64.0)),
    priced_on="c0ffee",
    p50=0.49,
    p90=0.55,
)


def test_a_prediction_reads_back_from_json() -> None:
    assert Prediction.from_dict(json.loads(json.dumps(PREDICTION.to_dict()))) == (PREDICTION, [])


def test_the_file_keeps_its_keys_and_ignores_others() -> None:
    data = PREDICTION.to_dict()
    assert [key for key in PREDICTION_KEYS if key in data] == [*data] and {"seconds", "predicted"} <= data.keys()
    assert not {"tried", "p50", "p90"} & replace(PREDICTION, p50=0.0, p90=0.0).to_dict().keys()  # nothing varies
    tried = replace(PREDICTION, tried=(Tried("mixed 4", "c0ffee", 64, 0.5, 0.6, 0.01, 3),))
    assert Prediction.from_dict(json.loads(json.dumps(tried.to_dict()))) == (tried, [])
    assert Prediction.from_dict({**data, "of_a_later_version": 1}) == (PREDICTION, [])


def test_the_slowest_rank_is_the_simulated_step() -> None:
    assert PREDICTION.simulated_seconds == 0.6 and Prediction().simulated_seconds == 0.0


def test_all_candidates_are_priced_once_and_only_when_they_are_read() -> None:
    calls: list[int] = []

    def every() -> tuple[Candidate, ...]:
        calls.append(1)
        return (*PREDICTION.priced, *PREDICTION.priced)

    lazy = replace(PREDICTION, all=every)
    assert lazy.to_dict() == PREDICTION.to_dict() and not calls
    assert len(lazy.candidates) == len(lazy.candidates) == 2 and len(calls) == 1


def test_weights_are_found_once_and_only_when_they_are_read() -> None:
    calls: list[int] = []

    def find() -> dict[str, tuple[float, ...]]:
        calls.append(1)
        return {"matmul": (0.5, 1.0, 0.0)}

    lazy, found = (replace(PREDICTION, weights=weights) for weights in (Later(find), {"matmul": (0.5, 1.0, 0.0)}))
    assert lazy.simulated_seconds and not calls
    assert lazy.to_dict() == found.to_dict() and pickle.loads(pickle.dumps(lazy)) == found == lazy and calls == [1]


def test_a_pickled_prediction_has_the_candidates_that_were_priced() -> None:
    lazy = replace(PREDICTION, all=lambda: (*PREDICTION.priced, *PREDICTION.priced))
    assert pickle.loads(pickle.dumps(lazy)).candidates == PREDICTION.priced
    assert len(lazy.candidates) == 2
    assert len(pickle.loads(pickle.dumps(lazy)).candidates) == 2
