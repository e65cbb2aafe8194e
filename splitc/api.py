"""`splitc.compile`: from a model to a compiled program that can be read, verified, saved and trained."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from splitc.capture.example.division import Batch
from splitc.capture.example.example import Example, Inputs, Loss
from splitc.capture.regions.regions import importable
from splitc.compiled import CompiledProgram, compile_example
from splitc.deferred import DeferredProgram
from splitc.errors import ArgumentError, PlacementError
from splitc.ir.autocast import require_autocast
from splitc.ir.cluster import Cluster
from splitc.ir.decode import typed
from splitc.ir.pass_manager import Watcher
from splitc.ir.placements import Placement
from splitc.ir.plan import Plan
from splitc.ir.short_wire import Given, free_kinds, parse_wire
from splitc.passes.planner.strategy import Strategy, in_microbatches, parse_strategy
from splitc.runtime.transport.meeting import refusals_told
from splitc.specialise import Settings


@typed
def compile(
    model: nn.Module | Callable[[], nn.Module],
    world: int,
    example: Inputs | None = None,
    target: Any = None,
    loss: Loss = None,
    global_batch: int | None = None,
    cluster: str | Path | Cluster | None = None,
    strategy: str | Strategy | type[Strategy] = "auto",
    pins: Mapping[str, str | Placement] | None = None,
    memory: float | None = None,
    microbatches: int | str = "auto",
    *,
    autocast: torch.dtype | None = None,
    batch: Batch = None,
    accumulate: int = 1,
    tune: float = 0.0,
    wire: Given = None,
    wire_error: float | None = None,
    name: str | None = None,
    plan: Plan | None = None,
    watch: Watcher | None = None,
) -> CompiledProgram | DeferredProgram:
    """Compile the training of `model` for `world` ranks; raise a SplitcError, of another type an ArgumentError.

    model: a module, or a function or class that returns one without arguments.
    example: one data-parallel rank's batch: a tensor, a tuple or a dict of keyword arguments, nested or not; dim 0 has
    the examples, or another one that agrees in size.  None: the program compiles on the first batch of its worker.
    target: a tensor with a row for each example, or a tuple of them, which the loss takes as arguments or as one; None
    for a loss of the output alone.
    loss: a function of (output, target), a module, or a list of them to sum; None: the model returns what holds it.
    global_batch: examples in a step over all ranks; None: the example's for each rank that reads data.
    cluster: a known name, a TOML file or a Cluster; None: this machine, measured once.  watch: called after each pass.
    strategy: a name, optionally with options, or a Strategy.  pins: layer pattern -> role or Placement.
    memory: bytes that a rank may use, in place of the cluster's.  plan: compile this plan instead of choosing one.
    microbatches: parts of each reader's batch, which travel while others are computed; "auto": as the strategy says.
    autocast: torch.bfloat16 or torch.float16 runs every forward under torch.autocast; parameters stay in float32.
    batch: how other tensors are divided: {"edge_index": None}, which every rank has whole, {"tokens": 1}, the dim of
    its examples; or a function of (batch, a, b) that returns examples a to b of it, as given (jagged tensors).
    accumulate: batches to an update that are allowed, over which gradients are summed once; fewer, where as fast.
    tune: seconds in which `worker` runs finalists, different plans that may be the fastest, in turns on its ranks, to
    take the fastest.  Weights, data and random numbers stay as they were; what was the fastest on these hosts is kept.
    wire: the format in which numbers travel, "bf16", "fp16", "int8" or "fp8", or by kind, {"activations": "bf16",
    "errors": "bf16", "gradients": "int8"}; training is approximate then.  None: as computed.
    wire_error: kinds without a format may have the one that makes steps shortest, of those that keep the relative error
    (L2) of every parameter's gradient below this, measured on batches of the example's rows on simulated ranks.
    """
    with refusals_told(world) as call:
        model, code = _made(model)
        call.know(model, loss)
        asked = in_microbatches(parse_strategy(strategy), microbatches)
        _require_sense(plan, tune, asked, autocast, (wire, wire_error))
        given = world, global_batch, cluster, asked, pins or {}, memory, autocast, code, accumulate, tune
        settings = Settings(*given, parse_wire(wire), wire_error or 0.0, free_kinds(wire_error, wire))
        if example is None:
            return DeferredProgram(model, loss, settings, name, call, batch)
        bound = Example.bind(model, example, target, loss, batch)
        made = compile_example(model, bound, settings, name=name, plan=plan, watch=watch)
        made.call = call
        return made


def _require_sense(
    plan: Plan | None, tune: float, asked: Strategy, autocast: torch.dtype | None, wire: tuple[object, ...]
) -> None:
    """Raise for arguments that have no sense by themselves, or none together."""
    require_autocast(autocast)
    if wire != (None, None) and plan is not None:
        raise PlacementError("the plan says in which formats numbers travel: leave out wire and wire_error")
    if not 0 <= tune < math.inf:
        raise PlacementError(f"tune is {tune!r}; give a number of seconds, or 0 to run no finalists")
    if tune and (plan is not None or asked.inserts_norm):
        raise PlacementError("tune chooses among plans of the model as it is: leave out plan, and subnets' norms")


def _made(model: nn.Module | Callable[[], nn.Module]) -> tuple[nn.Module, str | None]:
    """The model, and where the code of a factory is, as in model files."""
    code = None
    if not isinstance(model, nn.Module) and callable(model):
        name = getattr(model, "__name__", type(model).__name__)
        try:
            inspect.signature(model).bind()
        except TypeError as error:
            raise ArgumentError(f"compile: model is {name}, which cannot be called: {error}; give a module") from None
        except ValueError:  # what has no signature, as some classes of Python's own
            pass
        model, code = model(), importable(model)
        if not isinstance(model, nn.Module):
            raise ArgumentError(
                f"compile: model is {name}, which returns no module, but of type {type(model).__name__}; give a module"
            )
    return model, code
