"""The starts of a run and how each failed, beside its checkpoints: whether another start may do better.

{"start": "5f0a11c2"}                               of this build with these options
{"failed": "rank 1: ValueError: ...", "step": 121}
{"stop": "step 121 failed 3 times, ...", "always": true}
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..checkpoints.folders import AT, FAILURES
from ..transport.agreement import digest
from ..transport.started import was_restarted

TIMES = 3  # failures at a step, after which no other start is tried
_UNTOLD = "a rank was killed, by the kernel where memory runs out, or a host was lost"


class History:
    """That of one rank's run.  step: the one that is being made; 0: none yet.

    What cannot be written is not kept: the checkpoints, which lie there too, say what is wrong with the folder.
    """

    def __init__(self, folder: Path, script: Path) -> None:
        options = [each for each in sys.argv[1:] if each != "--resume"]
        texts = (path.read_bytes() for path in sorted(script.resolve().parent.glob("*.py")))
        self.folder, self._key = folder, digest(*texts, *map(str.encode, options))
        self._is_first, self.step = os.environ.get("RANK", "0") == "0", 0
        self._file: int | None = None

    def begin(self) -> str | None:
        """Note a start; returns why there must be none, without noting it."""
        *_, last = [dict[str, Any](), *self._own()]
        if "stop" in last and (last["always"] or was_restarted()):
            return str(last["stop"])
        if not self._is_first:
            return None
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.folder / AT, os.O_RDWR | os.O_CREAT, 0o666)
            step = int(os.pread(self._file, 20, 0) or 0)
            if "start" in last and step and (stop := self._failed(_UNTOLD, step)):
                return stop
        self.at(0)
        self._append(start=self._key)
        return None

    def at(self, step: int) -> None:
        """A step begins."""
        self.step = step
        if self._file is not None:
            with suppress(OSError):
                os.pwrite(self._file, b"%20d" % step, 0)

    def failed(self, why: str, final: bool) -> str | None:
        """Note the failure of this rank; returns why no other start can do better.  final: that is known."""
        if final:
            self._append(stop=why, always=False)
            return why
        return self._failed(f"rank {os.environ.get('RANK', '?')}: {why}", self.step)

    def ended(self) -> None:
        """Note that the run is complete, or has stopped as it was asked to."""
        if self._is_first:
            self._append(ended=self.step)

    def _failed(self, why: str, step: int) -> str | None:
        self._append(failed=why, step=step)
        starts: list[int] = []  # the step that failed in each
        for line in self._own():
            if "start" in line:
                starts.append(-1)
            elif "failed" in line and starts and starts[-1] < 0:
                starts[-1] = line["step"]
        if starts.count(step) < TIMES:
            return None
        where, path = f"step {step}" if step else "what comes before the first step", self.folder / FAILURES
        text = (
            f"{where} failed {TIMES} times, at last by: {why}\n  {path} has all; it is tried again with another build, "
            f"with other options, or when you delete that file"
        )
        self._append(stop=text, always=True)
        return text

    def _own(self) -> list[dict[str, Any]]:
        """What is noted of this build with these options, since others ran."""
        own: list[dict[str, Any]] = []
        with suppress(OSError, ValueError):
            for line in map(json.loads, (self.folder / FAILURES).read_text(encoding="utf-8").splitlines()):
                own = [line] if own and line.get("start", own[0]["start"]) != own[0]["start"] else [*own, line]
        return own if own and own[0].get("start") == self._key else []

    def _append(self, **line: Any) -> None:
        with suppress(OSError), (self.folder / FAILURES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
