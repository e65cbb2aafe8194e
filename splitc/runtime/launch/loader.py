"""Import generated files, from a folder or from their texts, and send those that rank 0 compiles to the others."""

from __future__ import annotations

import importlib
import inspect
import json
import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import BadZipFile, ZipFile

from torch import Tensor

from ..errors import LaunchError
from ..transport.agreement import agreed, digest, require_equal
from ..transport.base import Transport
from ..whole_state import scatter_state

_LOCK = threading.Lock()
_PLAN = re.compile(r"""^PLAN = ["'](\w+)["']""", re.MULTILINE)


def load_rank(source: Path | Mapping[str, str], rank: int, own: Mapping[str, Any] | None = None) -> Any:
    """Import the module `rankN` of a build, with its own copy of its role's module.

    own: the user's model and loss by name, in place of what the build imports for its regions.
    Simulated ranks load one build several times in a process, and a build's modules may have any name; so none of them
    stays in `sys.modules`, and other modules of these names are restored.
    """
    finder = _Finder(source)
    one_plan(source)
    with _LOCK:
        hidden = {name: sys.modules.pop(name) for name in finder.texts if name in sys.modules}
        sys.meta_path.insert(0, finder)
        try:
            part: Any = importlib.import_module(f"rank{rank}")
            if own:
                taken = inspect.signature(part.Stage).parameters.keys() & own.keys()
                part.Stage = partial(part.Stage, **{name: own[name] for name in taken}) if taken else part.Stage
            return part
        finally:
            sys.meta_path.remove(finder)
            for name in finder.texts:
                sys.modules.pop(name, None)
            sys.modules.update(hidden)


def one_plan(source: Path | Mapping[str, str]) -> None:
    """Raise LaunchError when files of a build carry the hashes of different plans: then some are stale.

    An edited file still carries its plan's hash; a file without one is the user's and may stand beside them.
    """
    if isinstance(source, Path):
        source = {
            path.name: path.read_text(encoding="utf-8", errors="replace")
            for path in sorted([*source.glob("*.py"), *source.glob("plan.json")])
        }
    plans: dict[str, list[str]] = {}
    for name, text in source.items():
        plan = _plan_of(name, text)
        if plan is not None:
            plans.setdefault(plan, []).append(name)
    if len(plans) > 1:
        listed = "; ".join(f"plan {plan}: {', '.join(names)}" for plan, names in plans.items())
        raise LaunchError(
            f"the build is stale, its files come from different plans ({listed}); compile the model again"
        )


def require_one_build(folder: Path, transport: Transport) -> None:
    """Raise LaunchError, on every rank, when hosts have different builds, or one was edited or made anew.  Collective.

    Weights are compared by the checksums of the tensors that their file lists.
    """
    texts = {path.name: path.read_bytes() for path in sorted(folder.glob("*.py"))}
    plans = {name: _plan_of(name, text.decode("utf-8", "replace")) for name, text in texts.items()}
    files = {name: digest(text) for name, text in texts.items() if plans[name]}
    with suppress(OSError, BadZipFile), ZipFile(folder / "weights.pt") as saved:
        files["weights.pt"] = digest(*(b"%d %d" % (each.CRC, each.file_size) for each in saved.infolist()))
    copy = "copy one build to every host"
    require_equal(transport, {"the plan": plans.get(f"rank{transport.rank}.py")}, copy)
    require_equal(transport, files, copy)


def _plan_of(name: str, text: str) -> str | None:
    """The hash of the plan that a file of a build carries; None where it carries none."""
    if name == "plan.json":
        try:
            return str(json.loads(text)["hash"])
        except (ValueError, KeyError, TypeError):
            return None  # nothing that training reads
    found = _PLAN.search(text)
    return found[1] if found else None


class _Finder(Loader):
    """Finds the modules of one build, and no others.  texts: module name -> source."""

    def __init__(self, source: Path | Mapping[str, str]) -> None:
        if isinstance(source, Path):
            paths = sorted(source.resolve().glob("*.py"))
            self.texts = {path.stem: path.read_text(encoding="utf-8") for path in paths}
            self._origins = {path.stem: str(path) for path in paths}
        else:
            self.texts = {name[:-3]: text for name, text in source.items() if name.endswith(".py")}
            self._origins = {name: f"<generated {name}.py>" for name in self.texts}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.texts:
            return None
        return ModuleSpec(name, self, origin=self._origins[name])

    def exec_module(self, module: ModuleType) -> None:
        text, origin = self.texts[module.__name__], self._origins[module.__name__]
        module.__file__ = origin
        linecache.cache[origin] = (len(text), None, text.splitlines(keepends=True), origin)  # for tracebacks
        exec(compile(text, origin, "exec"), module.__dict__)


def of_rank_0(
    transport: Transport,
    compiled: Callable[[], tuple[dict[str, str], Iterable[dict[str, Tensor]]]],
    own: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, Tensor]]:
    """This rank's program and weights, of the files that rank 0 compiles.  An error of one rank is raised on all.

    compiled: the files, and the weights of each rank.  own: as in `load_rank`.
    """
    weights: list[dict[str, Tensor]] = []

    def files_of() -> dict[str, str]:
        texts, parts = compiled()
        weights.extend(parts)
        return dict(texts)

    files = by_rank_0(transport, "compile the program", files_of)
    with agreed(transport, "load its program"):
        program = load_rank(files, transport.rank, own)
    return program, scatter_state(transport, weights or None)


def by_rank_0(transport: Transport, doing: str, value: Callable[[], Any]) -> Any:
    """What rank 0 computes, on every rank; its error is raised on all.  Collective."""
    # It may take minutes, and NCCL ends processes that wait so long.
    patient = transport.side_group() if transport.waits_hold_the_stream else None
    with agreed(patient or transport, doing):
        found = value() if transport.rank == 0 else None
    return transport.broadcast_object(found)
