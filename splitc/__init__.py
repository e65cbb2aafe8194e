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
    from splitc.prepared import prepare
    from splitc.strategies.auto import Auto
    from splitc.strategies.data_parallel import DataParallel
    from splitc.strategies.hybrid_single import HybridSingle
    from splitc.strategies.independent_subnets import IndependentSubnets
    from splitc.strategies.late_multiply import LateMultiply
    from splitc.strategies.layer_separation import LayerSeparation
    from splitc.strategies.local_sgd import LocalSGD
    from splitc.strategies.modulo_shard import ModuloShard
    from splitc.strategies.parameter_server import ParameterServer
    from splitc.strategies.single_device import SingleDevice
    from splitc.strategies.sites import Sites
    from splitc.verify.verify import Verification

_MODULES = {
    "api": "compile",
    "compiled": "CompiledProgram",
    "ir.cluster": "Cluster Device Link",
    "errors": "SplitcError CaptureError CostError PlacementError LaunchError InternalError",
    "ir.placements": "Grouping Placement",
    "ir.plan": "Plan",
    "ir.prediction": "Candidate",
    "prepared": "prepare",
    "strategies.auto": "Auto",
    "strategies.data_parallel": "DataParallel",
    "strategies.hybrid_single": "HybridSingle",
    "strategies.independent_subnets": "IndependentSubnets",
    "strategies.late_multiply": "LateMultiply",
    "strategies.layer_separation": "LayerSeparation",
    "strategies.local_sgd": "LocalSGD",
    "strategies.modulo_shard": "ModuloShard",
    "strategies.parameter_server": "ParameterServer",
    "strategies.single_device": "SingleDevice",
    "strategies.sites": "Sites",
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
    "Sites",
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
