"""splitc: compile a PyTorch model into one readable program for each rank of a cluster.

    program = splitc.compile(model, world=8, example=(images,), target=labels, loss=F.cross_entropy)
    print(program.report())

Names load on first use, so that `import splitc` is quick; `__init__.pyi` lists them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from splitc.version import __version__ as __version__

_LINES = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8").splitlines()
_HOMES = {line.split()[3]: line.split()[1] for line in _LINES if line.startswith("from ")}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'splitc' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
