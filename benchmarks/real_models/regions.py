"""The parts of a program that stay the user's own code, and how much of the model they are."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.real_models.case import Case
from benchmarks.real_models.eager import scalar_loss
from splitc.ir.program import Program
from splitc.ir.regions import regions


@dataclass(frozen=True)
class Regions:
    """number: calls.  parameters, flops: their share of the model's, 0 to 1.  why: the lines that made them."""

    number: int = 0
    parameters: float = 0.0
    flops: float = 0.0
    why: tuple[str, ...] = ()

    @property
    def large(self) -> bool:
        """Whether more than a tenth of the model is in them."""
        return max(self.parameters, self.flops) > 0.1


def regions_of(program: Program, case: Case) -> Regions:
    """The regions of a program, with shares counted on the eager model."""
    found = [own for _, own in regions(program)]
    paths = {own.path for own in found if not own.is_function and _is_module(case.module, own.path)}
    if not found:
        return Regions()
    inside = {id(p): p for path in paths for p in case.module.get_submodule(path).parameters()}
    parameters = sum(p.numel() for p in inside.values()) / max(sum(p.numel() for p in case.module.parameters()), 1)
    return Regions(len(found), parameters, _share_of_flops(case, paths), tuple(dict.fromkeys(own.why for own in found)))


def _is_module(module: nn.Module, path: str) -> bool:
    return not path or path in dict(module.named_modules())


def _share_of_flops(case: Case, paths: set[str]) -> float:
    """The share of a forward's matrix products and convolutions that these submodules run."""
    module = copy.deepcopy(case.module)
    with FlopCounterMode(display=False) as counter:
        scalar_loss(case, case.inputs, case.target, module)
    counts = {name: sum(of.values()) for name, of in counter.get_flop_counts().items()}
    root = type(module).__name__
    outer = {path for path in paths if not any(path.startswith(f"{other}.") for other in paths)}
    inside = sum(counts.get(f"{root}.{path}" if path else root, 0) for path in outer)
    return float(inside / max(counts.get("Global", 0), 1))
