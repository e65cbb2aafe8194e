"""splitc: compile a PyTorch model into one readable program for each rank of a cluster.

    program = splitc.compile(model, world=8, example=(images,), target=labels, loss=F.cross_entropy)
    print(program.report())

Names load on first use, so that `import splitc` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from splitc.version import __version__ as __version__

if TYPE_CHECKING:
    from splitc.api import compile as compile
    from splitc.compiled import CompiledProgram as CompiledProgram
    from splitc.errors import ArgumentError as ArgumentError
    from splitc.errors import CaptureError as CaptureError
    from splitc.errors import CostError as CostError
    from splitc.errors import InternalError as InternalError
    from splitc.errors import LaunchError as LaunchError
    from splitc.errors import PlacementError as PlacementError
    from splitc.errors import SplitcError as SplitcError
    from splitc.ir.cluster import Cluster as Cluster
    from splitc.ir.device import Device as Device
    from splitc.ir.device import Link as Link
    from splitc.ir.placements import Grouping as Grouping
    from splitc.ir.placements import Placement as Placement
    from splitc.ir.plan import Plan as Plan
    from splitc.ir.prediction import Candidate as Candidate
    from splitc.prepared import prepare as prepare
    from splitc.strategies.auto import Auto as Auto
    from splitc.strategies.data_parallel import DataParallel as DataParallel
    from splitc.strategies.hybrid_single import HybridSingle as HybridSingle
    from splitc.strategies.independent_subnets import IndependentSubnets as IndependentSubnets
    from splitc.strategies.late_multiply import LateMultiply as LateMultiply
    from splitc.strategies.layer_separation import LayerSeparation as LayerSeparation
    from splitc.strategies.local_sgd import LocalSGD as LocalSGD
    from splitc.strategies.modulo_shard import ModuloShard as ModuloShard
    from splitc.strategies.parameter_server import ParameterServer as ParameterServer
    from splitc.strategies.single_device import SingleDevice as SingleDevice
    from splitc.strategies.sites import Sites as Sites
    from splitc.verify.verify import Verification as Verification


_MODULES = {
    "api": "compile",
    "compiled": "CompiledProgram",
    "ir.cluster": "Cluster Device Link",
    "errors": "SplitcError ArgumentError CaptureError CostError PlacementError LaunchError InternalError",
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

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'splitc' has no attribute {name!r}")
    return getattr(import_module(f"splitc.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
