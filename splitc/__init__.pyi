"""The names of splitc, by the modules that they are in."""

__all__: list[str]

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
from splitc.version import __version__ as __version__
