"""What a trial of `verify` sets in its process, and leaves there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from splitc.runtime.launch import trial
from splitc.verify import verify

CUDNN: Any = torch.backends.cudnn


def precisions() -> tuple[str, str, str]:
    return CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision, torch.backends.cuda.matmul.fp32_precision


class Enough(Exception):
    pass


def test_float32_has_all_its_bits_in_a_trial_and_what_was_set_before_comes_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    def look(*_: Any, **__: Any) -> None:
        seen.append(precisions())
        raise Enough

    nothing: Any = None
    for name in ("trial.pt", "weights.pt"):
        torch.save({}, tmp_path / name)
    monkeypatch.setattr(trial, "init", look)
    monkeypatch.setattr(verify, "within_example", look)
    monkeypatch.setattr("sys.argv", ["trial", str(tmp_path)])
    before = precisions()
    assert "tf32" in before  # torch's default, of convolutions
    with pytest.raises(Enough):
        trial._main()
    with pytest.raises(Enough):
        verify.verify_program(nothing, {}, nothing, nothing, {}, (), processes=False, steps=1, seed=0)
    assert seen == [("ieee", "ieee", "ieee")] * 2
    assert precisions() == before
    assert torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32  # torch refuses to tell a mix
