"""The threads of a rank that end it, with all others, when it waits in vain.

One looks at what the program waits for.  When that takes too long, another one asks every rank through the store of the
process group what it does, on a connection of its own, since the program may be blocked in another one.  The rank that
asks joins the answers to a page, prints it, and tells all to end.  A rank that waits too long and has no word from the
store either ends alone.

Seconds are counted in looks, so that a process that was stopped, and goes on, waits anew.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from ..errors import RESTART
from .page import FIRST, LONG, aborted, alone, page
from .state import State, where

_TIMES = 5.0  # the longest wait so far, or the predicted step, that a wait may take
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)  # of a signal, called at once in the thread that raises it
_STATES = {"T": "it is stopped (SIGSTOP)", "t": "a debugger stops it", "Z": "it has ended", "": "it has ended"}


class Watch:
    """Watches what a rank waits for.

    transport: a `TorchTransport`, which notes waits and knows whether the last operation still blocks the program.
    store: where ranks ask and answer.  floor: seconds that any wait may take.  host: where this rank is.
    say, end: print a page, and end this process.  patience: seconds that a rank may take to answer.
    """

    def __init__(
        self,
        transport: Any,
        store: Any,
        floor: float,
        host: str,
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
        end: Callable[[], None] = lambda: os._exit(RESTART),
        patience: float | None = None,
    ) -> None:
        self._rank, self._world, self._waits = transport.rank, transport.world, transport.waits
        self._blocked, self._store, self._floor = transport.is_blocked, store, floor
        self._host, self._say, self._end, self._pid = host, say, end, os.getpid()
        self._every = min(1.0, floor / 10)  # seconds between two looks
        self._patience = patience or min(15.0, floor / 2)
        self._thread, self._training = threading.get_ident(), cast(Callable[[], Any], lambda: None)
        self._seen, self._waited, self._longest, self._next = self._waits.now, 0.0, 0.0, 0.0
        self._answered, self._unheard = 0, 0.0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._look, self._talk)]
        for thread in self._threads:
            thread.start()
        self._handler = _Handler(self._aborted)
        ctypes.CDLL(None).signal(signal.SIGABRT, self._handler)
        atexit.register(self.close)

    def follow(self, training: Any) -> None:
        """Tell of this training from now on; it is not kept alive."""
        self._thread, self._training = threading.get_ident(), weakref.ref(training)

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()
        ctypes.CDLL(None).signal(signal.SIGABRT, None)
        atexit.unregister(self.close)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1.0)  # a request of the store that outlives the interpreter would abort it

    def _state(self) -> State:
        training = self._training()
        doing, line, own = where(self._thread, None if training is None else training._program)
        what, ends = self._waits.now[:2] if self._blocked() else ("", ())
        evaluated = 0 if training is None else training.rank.evaluated
        return State(self._steps, evaluated, doing, what, ends, self._waited, self._allowed, line, own)

    @property
    def _steps(self) -> int:
        return getattr(self._training(), "_steps", 0)

    @property
    def _allowed(self) -> float:
        """Seconds that a wait may take before this rank asks."""
        live = getattr(self._training(), "live", None)
        expected = 0.0 if live is None else live.expected.seconds
        return max(self._floor, _TIMES * max(self._longest, expected)) * (LONG if self._steps < FIRST else 1)

    @property
    def _is_late(self) -> bool:
        return self._waited > max(self._allowed, self._next) and self._blocked()

    def _look(self) -> None:
        """Count for how long the program has been where it is."""
        while not self._over.wait(self._every):
            if (now := self._waits.now) is self._seen:
                self._waited += self._every
            else:
                if self._seen[0] and self._steps >= FIRST:
                    self._longest = max(self._longest, self._waited)
                self._seen, self._waited, self._next = now, 0.0, 0.0
            self._unheard += self._every
            silence = 2 * self._patience + 4 * self._every  # the others, who have the store, say more before
            if min(self._unheard, self._waited - self._allowed) > silence and self._is_late:
                self._say(alone(self._rank, self._state(), self._unheard, os.environ.get("MASTER_ADDR", "")))
                self._end()

    def _talk(self) -> None:
        """Answer those who ask, and ask when this rank is late."""
        with suppress(RuntimeError):
            self._store.set(f"{self._rank}", json.dumps([self._host, os.getpid(), _process(os.getpid())[1]]))
        while not self._over.wait(self._every):
            with suppress(RuntimeError):  # of a store that is gone: `_look` counts for how long
                asked = self._store.add("asked", 0)
                self._unheard = 0.0
                if asked > self._answered:
                    self._answer(asked)
                elif self._is_late:
                    self._ask_first(asked + 1, self._late)

    def _aborted(self, number: int) -> None:
        """A library ends this process, gloo does so where ranks have made unlike calls: say what they do."""
        if os.getpid() == self._pid:
            with suppress(RuntimeError):
                self._ask_first(self._store.add("asked", 0) + 1, lambda states: aborted(states, self._rank))
            time.sleep(3 * self._patience)  # a rank that has asked before ends this one

    def _answer(self, number: int) -> None:
        """Tell what this rank does, and end if the rank that asked says so."""
        self._answered, verdict = number, f"{number} verdict"
        self._store.set(f"{number} {self._rank}", json.dumps(asdict(self._state())))
        if self._until(lambda: self._store.check([verdict]), 2 * self._patience):
            asker, is_over, cause = json.loads(self._store.get(verdict))
            if is_over:
                if asker != self._host and os.environ.get("LOCAL_RANK", "0") == "0":
                    self._say(f"{cause} (a rank of {asker} has printed more)")
                self._store.add(f"{number} ends", 1)
                time.sleep(3 * min(0.1, self._every))  # while its peers are there nobody ends the rank that asked
                self._end()

    def _ask_first(self, number: int, explain: Callable[[Mapping[int, State]], str]) -> None:
        """Ask, unless another rank was quicker."""
        if self._store.add(f"{number} asks", 1) == 1:
            self._store.set("asked", str(number))
            self._ask(number, explain)

    def _ask(self, number: int, explain: Callable[[Mapping[int, State]], str]) -> None:
        """Ask every rank what it does; print what explains it, and end all, unless they may go on."""
        keys, self._answered = [f"{number} {rank}" for rank in range(self._world)], number
        self._store.set(keys[self._rank], json.dumps(asdict(self._state())))
        self._until(lambda: self._store.check(keys), self._patience)
        if self._over.is_set():
            return
        there = [rank for rank, key in enumerate(keys) if self._store.check([key])]
        states = {rank: State(**json.loads(self._store.get(keys[rank]))) for rank in there}
        text = explain(states)
        self._next = self._waited + self._floor / 4
        if text:
            self._say(text)
        self._store.set(f"{number} verdict", json.dumps([self._host, bool(text), text.partition("\n")[0]]))
        if text:
            self._until(lambda: self._store.add(f"{number} ends", 0) >= len(there) - 1, 2.0)
            for rank in set(range(self._world)) - states.keys():
                self._kill(rank)
            self._end()

    def _late(self, states: Mapping[int, State]) -> str:
        """Why this rank waits; empty while it may go on."""
        text = page(states, self._rank, self._about)
        return text and f"{text}\n  a wait may take {self._floor:g} s, more in slow steps: SPLITC_TIMEOUT sets it"

    def _kill(self, rank: int) -> None:
        """End a rank of this host that gives no answer; one that is stopped would not be ended by SIGTERM."""
        if self._store.check([f"{rank}"]):
            host, pid, born = json.loads(self._store.get(f"{rank}"))
            if host == self._host and pid != os.getpid() and born and _process(pid)[1] == born:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition of the store; whether it holds."""
        end = time.monotonic() + seconds
        while not (holds := condition()) and time.monotonic() < end and not self._over.wait(min(0.1, self._every)):
            self._unheard = 0.0
        return holds

    def _about(self, rank: int) -> str:
        """What is known of a rank that gives no answer."""
        if not self._store.check([f"{rank}"]):
            return f"rank {rank}"
        host, pid, _ = json.loads(self._store.get(f"{rank}"))
        if host != self._host or not Path("/proc/self/stat").exists():
            return f"rank {rank} ({host}): it is stopped, its line is cut, or its host is gone"
        return f"rank {rank}: " + _STATES.get(
            _process(pid)[0], "its line is cut, or it runs code that holds Python's lock"
        )


def _process(pid: int) -> tuple[str, str]:
    """The state of a process, and when it began; nothing where it is gone."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    return "", ""
