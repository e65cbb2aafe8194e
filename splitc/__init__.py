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
    from splitc.ir.placements import Grouping, Placement
    from splitc.ir.plan import Plan
    from splitc.ir.prediction import Candidate
    from splitc.ir.strategies import (
        Auto,
        DataParallel,
        HybridSingle,
        IndependentSubnets,
        LateMultiply,
        LayerSeparation,
        LocalSGD,
        ModuloShard,
        ParameterServer,
        SingleDevice,
    )
    from splitc.prepared import prepare
    from splitc.verify.verify import Verification

_MODULES = {
    "api": "compile",
    "compiled": "CompiledProgram",
    "ir.cluster": "Cluster Device Link",
    "errors": "SplitcError CaptureError CostError PlacementError LaunchError InternalError",
    "ir.placements": "Grouping Placement",
    "ir.plan": "Plan",
    "ir.prediction": "Candidate",
    "ir.strategies": "Auto SingleDevice DataParallel LayerSeparation HybridSingle IndependentSubnets LateMultiply "
    "LocalSGD ModuloShard ParameterServer",
    "prepared": "prepare",
    "verify.verify": "Verification",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

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
    "IndependentSubnets",
    "InternalError",
    "LateMultiply",
    "LaunchError",
    "LayerSeparation",
    "Link",
    "LocalSGD",
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
    "prepare",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'splitc' has no attribute {name!r}")
    return getattr(import_module(f"splitc.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
