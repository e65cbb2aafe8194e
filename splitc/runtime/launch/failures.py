"""How a rank fails: its error is printed once on each host, and the process ends.

torchrun prints a traceback of its own, and lists every process that ended with an error; so of the ranks of a host that
have one error in common only the first ends with one.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from ..errors import DONE, RESTART, STOP, LaunchError, RanksApart, SplitcError
from ..transport.base import PeerLost
from .history import History

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun reads there why a rank failed; its folder is that of one attempt
_ELSEWHERE = "(if a rank failed by itself, its error stands above, or on its host; --resume goes on from a checkpoint)"


def guarded(run: Callable[[], object], history: History | None = None) -> None:
    """Run a rank so that the error that caused a failure is printed first, and no process keeps running.

    A rank that lost a peer waits a moment before it exits: by then the peer has printed its own error.  torchrun learns
    of the ranks that failed by themselves, and stops the others.  history: that of a run which is started again.
    """
    rank = os.environ.get("RANK", "?")
    try:
        if history is not None and (stop := history.begin()):
            _exit(stop, code=STOP)
        run()
        if history is not None:
            history.ended()
    except SplitcError as error:
        wrong = isinstance(error, LaunchError) and not isinstance(error, RanksApart)
        final = wrong and not (history and history.step)
        _exit(f"error: {with_notes(error)}", code=STOP if final else RESTART, history=history)
    except PeerLost as error:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which torchrun ends the ranks that have nothing to add
        time.sleep(2.0)
        text = f"stopped: {with_notes(error)}\n  {_ELSEWHERE}"
        _exit(text, "a peer was lost", by_itself=False)
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        _exit(f"rank {rank} failed:\n{_traceback(error)}", f"{type(error).__name__}: {error}", history=history)


def guard_script() -> None:
    """Let an exception that ends a script of the user's own end it as `guarded` does."""

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        def again() -> None:
            raise error

        sys.stderr = sys.__stderr__  # torch's hook around this one would keep the text until it returns
        guarded(again)

    sys.excepthook = told


def with_notes(error: BaseException) -> str:
    """The text of an error and of what was noted on its way."""
    return "\n  ".join([str(error), *getattr(error, "__notes__", [])])


def _traceback(error: BaseException) -> str:
    """The traceback of an error; of the user's code alone where it comes from there."""
    shown = traceback.TracebackException.from_exception(error)
    own = str(Path(__file__).parents[1])
    if shown.stack and not shown.stack[-1].filename.startswith(own):
        shown.stack = traceback.StackSummary.from_list([f for f in shown.stack if not f.filename.startswith(own)])
    return "".join(shown.format())


def _exit(
    message: str, kind: str | None = None, by_itself: bool = True, code: int = RESTART, history: History | None = None
) -> NoReturn:
    """End this process.  kind: what ranks with the same failure have in common."""
    sys.stdout.flush()
    first = _is_first(kind or message)
    if first:
        print(message, file=sys.stderr, flush=True)
    if first and by_itself and history is not None and (stop := history.failed(kind or message, final=code == STOP)):
        code = STOP
        if stop != message:
            print(stop, file=sys.stderr, flush=True)
    if first and by_itself and _ERROR_FILE in os.environ:
        reason = {"message": "its error is printed above", "extraInfo": {"timestamp": int(time.time())}}
        Path(os.environ[_ERROR_FILE]).write_text(json.dumps({"message": reason}), encoding="utf-8")
    os._exit(code if first else DONE)  # a poisoned process group may block an ordinary exit


def _is_first(kind: str) -> bool:
    """Whether no other rank of this host and attempt has failed in this way."""
    if _ERROR_FILE not in os.environ:
        return True
    name = f"failed-{hashlib.sha256(kind.encode()).hexdigest()[:16]}"
    try:
        (Path(os.environ[_ERROR_FILE]).parents[1] / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True
