"""splitc: compile a PyTorch model into one readable program for each rank of a cluster.

    program = splitc.compile(model, world=8, example=(images,), target=labels, loss=F.cross_entropy)
    print(program.report())

Names load on first use, so that `import splitc` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from splitc.version import __version__

if TYPE_CHECKING:
    from splitc.api import compile
    from splitc.compiled import CompiledProgram
    from splitc.errors import CaptureError, CostError, InternalError, LaunchError, PlacementError, SplitcError
    from splitc.ir.cluster import Cluster, Device, Link
    from splitc.ir.plan import Grouping, Placement, Plan
    from splitc.ir.prediction import Candidate
    from splitc.ir.strategies import (
        Auto,
        DataParallel,
        HybridSingle,
        LateMultiply,
        LayerSeparation,
        ModuloShard,
        ParameterServer,
        SingleDevice,
    )
    from splitc.verify.verify import Verification

_HOMES = {
    "compile": "api",
    "CompiledProgram": "compiled",
    "Cluster": "ir.cluster",
    "Device": "ir.cluster",
    "Link": "ir.cluster",
    "SplitcError": "errors",
    "CaptureError": "errors",
    "CostError": "errors",
    "PlacementError": "errors",
    "LaunchError": "errors",
    "InternalError": "errors",
    "Plan": "ir.plan",
    "Placement": "ir.plan",
    "Candidate": "ir.prediction",
    "Grouping": "ir.plan",
    "Auto": "ir.strategies",
    "SingleDevice": "ir.strategies",
    "DataParallel": "ir.strategies",
    "LayerSeparation": "ir.strategies",
    "HybridSingle": "ir.strategies",
    "LateMultiply": "ir.strategies",
    "ModuloShard": "ir.strategies",
    "ParameterServer": "ir.strategies",
    "Verification": "verify.verify",
}

__all__ = [
    "Auto",
    "Candidate",
    "CaptureError",
    "Cluster",
    "CompiledProgram",
    "CostError",
    "DataParallel",
    "Device",
    "Grouping",
    "HybridSingle",
    "InternalError",
    "LateMultiply",
    "LaunchError",
    "LayerSeparation",
    "Link",
    "ModuloShard",
    "ParameterServer",
    "Placement",
    "PlacementError",
    "Plan",
    "SingleDevice",
    "SplitcError",
    "Verification",
    "__version__",
    "compile",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'splitc' has no attribute {name!r}")
    return getattr(import_module(f"splitc.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
