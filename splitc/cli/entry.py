"""Run one command and turn errors into a message and an exit code.

Exit codes: 0 done; 1 a run failed, a verification does not hold, a requirement is not met, or a bug of splitc; 2 the
input is wrong; 130 stopped.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType

from splitc.cli.commands import run
from splitc.cli.options import parse
from splitc.errors import InternalError, RanksFailed, SplitcError

_REPORT = "this is a bug of splitc, not of your input; please report it with the command and the text above"

_NEEDED = ("torch", "numpy", "networkx", "pulp", "tabulate", "tomli_w")
_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `argv`, by default that of this process; return the exit code."""
    gc.set_threshold(max(gc.get_threshold()[0], 20_000))  # torch makes a million objects that are no garbage
    verbose, runs_model, argv = False, False, sys.argv[1:] if argv is None else argv
    try:
        args = parse(argv)
        verbose, runs_model = getattr(args, "verbose", False), bool({"model", "models"} & vars(args).keys())
        code = run(args)
        sys.stdout.flush()
        return code
    except SystemExit as leave:  # --help, --version
        if runs_model:
            return _say("the code of the model ends Python, by sys.exit; let its forward raise an error instead", 2)
        return leave.code if isinstance(leave.code, int) else 0
    except KeyboardInterrupt:
        return _say("stopped", 130)
    except BrokenPipeError:  # the reader of stdout has closed it, `| head` for example
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SplitcError as error:
        return _say(_with_notes(error), 1 if isinstance(error, RanksFailed) else 2)
    except MemoryError:
        return _say("this machine has not enough memory for that; take a smaller batch with --input", 1)
    except Exception as error:
        if _is_transport_error(error):
            return _say(_with_notes(error), 1)
        if (problem := _of_this_machine(error)) is not None:
            return _say(problem, 1)
        if verbose:
            raise
        return _say(_bug(error), 1)


def _say(text: str, code: int) -> int:
    print(f"splitc: {text}", file=sys.stderr)
    return code


def _with_notes(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def _is_transport_error(error: Exception) -> bool:
    """Whether ranks lost each other.  Compares module names, since importing these errors would load torch."""
    return any(kind.__module__ == "splitc.runtime.transport.base" for kind in type(error).__mro__)


def _of_this_machine(error: Exception) -> str | None:
    """What this machine lacks, a dependency or room on a disk; None where the error is of another kind."""
    if isinstance(error, OSError) and error.errno in _MACHINE:
        return f"cannot write {error.filename or 'a file'}: {error.strerror}"
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>")
    importing = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    missing = error.name if isinstance(error, ModuleNotFoundError) and error.name in _NEEDED else None
    broken = next((name for name in importing if name in _NEEDED and isinstance(error, ImportError | OSError)), None)
    if missing is None and broken is None:
        return None
    return (
        f"{sys.executable} cannot import {missing or broken}, which splitc needs ({type(error).__name__}: {error}); "
        f"install it there: python -m pip install {missing or broken}"
    )


def _bug(error: Exception) -> str:
    kind = "" if isinstance(error, InternalError) else f"{type(error).__name__}: "
    return f"{kind}{_with_notes(error)}{_where(error.__traceback__)}\n{_REPORT}"


def _where(at: TracebackType | None) -> str:
    """A line that names the innermost line of splitc: `at splitc/capture/capture.py:120 in capture`."""
    frames = ((str(frame.f_globals.get("__name__")), line, frame) for frame, line in traceback.walk_tb(at))
    own = [
        f"{module.replace('.', '/')}.py:{line} in {frame.f_code.co_name}"
        for module, line, frame in frames
        if module.split(".")[0] == "splitc"
    ]
    return f"\n  at {own[-1]}; -v shows more" if own else ""
