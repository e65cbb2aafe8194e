"""Stop all ranks after the same step when one of them gets a signal.

Nothing is sent in a step, which takes a lock that nobody else wants.  A rank that gets a signal asks all ranks through
the store; each says which step it has begun, begins no other, and all go on to the last of these steps, or to the end
of what it belongs to: an update of several batches, or a round.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import RESTART, SIGNALS

_WITHIN = 5.0  # seconds in which a rank that lives says which step it has begun, whatever it does meanwhile
_LOOK = 2.0  # seconds, after which a rank looks whether the process that started it still runs
_ALWAYS = timedelta(days=20)  # milliseconds of it fit into 32 bits


class Stopped(Exception):
    """All ranks have made the same steps, and stop: a signal, by its name, asked for it."""


class Stopping:
    """When one rank of a run stops.

    transport: a `TorchTransport`; clones of its store have connections of their own, on which threads wait.
    made: steps.
    """

    def __init__(self, transport: Any, made: int = 0) -> None:
        self._asks = transport.store.clone()
        self._keys = [f"splitc/stop/{rank}" for rank in range(transport.world)]
        self._own = self._keys[transport.rank]
        self._at, self._last, self._name = (1, 0, made), 0, ""  # steps of a cycle, before the present one, begun
        self._lock, self._is_asked, self._is_over = threading.Lock(), False, False
        self._decided = threading.Event()
        self._watching = threading.Thread(target=self._watch, args=(transport.store.clone(),), daemon=True)
        self._watching.start()
        if threading.current_thread() is threading.main_thread():
            self._listen()

    def before(self, step: int, cycle: tuple[int, int] = (1, 0)) -> None:
        """A step is about to begin; cycle: as of `Training`.  Raises Stopped where no rank makes it."""
        with self._lock:
            if not self._is_asked:
                self._at = cycle[0], step - 1 - cycle[1], step
                return
        self._decided.wait()
        if step > self._last:
            raise Stopped(self._name)

    def ask(self, name: str) -> None:
        """Let all ranks stop, for a signal of this name."""
        with suppress(RuntimeError):  # the store is gone, and so is the run
            self._asks.multi_set(self._keys, [name] * len(self._keys))

    def close(self) -> None:
        """The run is over: this rank makes no more steps, and does not hold up others."""
        with self._lock:
            was_asked, self._is_asked, self._is_over = self._is_asked, True, True
        with suppress(RuntimeError):
            if not was_asked:
                self._post(self._asks)
                self._asks.set(self._own, "")
            self._watching.join(_WITHIN)

    def _listen(self) -> None:
        """Take the signals of this process, in a thread: the main thread may be inside an operation that waits."""
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: None)
        os.register_at_fork(after_in_child=_leave_signals)
        threading.Thread(target=self._take, args=(reading, writing, os.getppid()), daemon=True).start()

    def _take(self, reading: socket.socket, writing: socket.socket, parent: int) -> None:
        """Ask for each signal that comes; end the process at a second Ctrl-C, or when its torchrun has gone."""
        reading.settimeout(_LOOK)
        is_stopped = False
        while os.getppid() == parent or "TORCHELASTIC_RUN_ID" not in os.environ:
            with suppress(TimeoutError):
                for number in filter(SIGNALS.get, reading.recv(64)):
                    if is_stopped and number == signal.SIGINT:
                        os._exit(130)
                    is_stopped = is_stopped or number == signal.SIGINT
                    threading.Thread(target=self._heard, args=(SIGNALS[number],), daemon=True).start()
        os._exit(RESTART)

    def _heard(self, name: str) -> None:
        """Ask, and end this process unless the ranks agree: nothing comes from a store whose host is gone."""
        self.ask(name)
        if not (self._decided.wait(1.5 * _WITHIN) or self._is_over):
            os._exit(RESTART)

    def _post(self, store: Any) -> None:
        store.set(f"{self._own}/step", "{} {} {}".format(*self._at))

    def _watch(self, store: Any) -> None:
        """Wait until a rank asks, and find the last step with the others."""
        try:
            store.wait([self._own], _ALWAYS)
            self._name = store.get(self._own).decode()
        except dist.DistStoreError:
            return self._watch(store)
        except RuntimeError:
            return
        with self._lock:
            if self._is_over:
                return
            self._is_asked = True
        try:
            self._post(store)
            every = [f"{key}/step" for key in self._keys]
            store.wait(every, timedelta(seconds=_WITHIN))
            cycles, begins, steps = zip(*(map(int, each.split()) for each in store.multi_get(every)), strict=True)
        except RuntimeError:  # a rank is gone, and the signal is of who ends the others
            os._exit(RESTART)
        cycle, begin = max(zip(cycles, begins, strict=True))
        self._last = begin - (begin - max(steps)) // cycle * cycle
        self._decided.set()


def _leave_signals() -> None:
    """In a process of a loader: leave the signals to the rank, but for the one by which it ends the process."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
