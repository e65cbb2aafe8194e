"""Import generated files: from a folder, or from their texts without one."""

from __future__ import annotations

import importlib
import linecache
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

_LOCK = threading.Lock()


def load_rank(source: Path | Mapping[str, str], rank: int) -> Any:
    """The module `rankN` of a build, with its own copy of its role's module.

    Simulated ranks load one build several times in a process, so nothing stays in `sys.modules`.
    """
    files = source if isinstance(source, Mapping) else {p.name: p.read_text() for p in source.glob("*.py")}
    names = [name.removesuffix(".py") for name in files if name.endswith(".py")]
    finder = _Finder(files)
    with _LOCK:
        hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
        sys.meta_path.insert(0, finder)
        try:
            return importlib.import_module(f"rank{rank}")
        finally:
            sys.meta_path.remove(finder)
            for name in names:
                sys.modules.pop(name, None)
            sys.modules.update(hidden)


class _Finder:
    """Finds the modules of one build by their texts."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if f"{name}.py" not in self._files:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=f"<generated {name}.py>")  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        text = self._files[f"{module.__name__}.py"]
        origin = f"<generated {module.__name__}.py>"
        linecache.cache[origin] = (len(text), None, text.splitlines(keepends=True), origin)
        exec(compile(text, origin, "exec"), module.__dict__)  # the same code that is on disk
