"""Refuse what a graph cannot represent, with a remedy."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from splitc.capture.source_lines import user_line
from splitc.errors import CaptureError, bullets
from splitc.runtime.own_code import plain_tensors


class Unsupported(Exception):
    """A graph cannot represent this.  The tracer turns it into a CaptureError at `line`, by default the current one.

    stays: it would train wrong as the user's own code too, so no region is made of it.
    """

    def __init__(self, text: str, line: str | None = None, stays: bool = False) -> None:
        super().__init__(text)
        self.line, self.stays = line, stays


class Failed(Unsupported):
    """The operation itself fails, as it may do in the model too, which may handle it."""


@dataclass(frozen=True)
class Failure:
    """Where a trace failed: in the forward of the module at `path`.  kind: the module's class.  line: the user's."""

    path: str
    kind: type[nn.Module]
    line: str


DATA = (
    "its value depends on the data, so there is no one graph for all batches; use torch.where, masks or other "
    "operations over the whole batch"
)

DATA_ACCESSES = {
    "item": "item()",
    "tolist": "tolist()",
    "numpy": "numpy()",
    "__array__": "numpy()",
    "__bool__": "a branch",
    "__int__": "int()",
    "__float__": "float()",
    "__index__": "an index",
}
"""Methods that read the data of a tensor -> how messages name them."""

_WRAPPED = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
"""Wrappers of a model -> their attribute that holds it."""


def random_text(name: str) -> str:
    """Why a random operation is refused."""
    return (
        f"{name} draws random numbers that cannot be seeded by example, so each rank would draw others than one "
        f"process: use dropout, rand, randn, randint, bernoulli or normal without a generator, or draw with the data"
    )


def hook_text(name: str) -> str:
    """Why a hook on a tensor, or a backward inside forward, is refused."""
    return f"{name} acts on gradients on their way, which a graph would lose; write it with torch operations in forward"


def writes_text(what: str, name: str) -> str:
    """Why writing into a parameter or buffer is refused."""
    return (
        f"{what} writes into {name} while the model runs: ranks see different parts of the batch, so their copies "
        f"would differ; compute it from the inputs, or change it outside of forward"
    )


def autocast_text(own: torch.dtype | None) -> str:
    """Why a forward that enters torch.autocast to `own` (None: turns it off) is refused."""
    does, instead = "turns torch.autocast off for a part of itself", "or compile without autocast"
    if own is not None:
        does = f"enters torch.autocast in {str(own).removeprefix('torch.')} itself"
        instead = "and compile with autocast=torch.bfloat16"
    around = "a program has it around the whole forward of every stage; leave the region out of forward"
    return f"forward {does}, and {around}, {instead}"


@contextmanager
def no_other_autocast(around: torch.dtype | None, is_ours: Callable[[], bool]) -> Iterator[None]:
    """Raise Unsupported when the code inside enters an autocast other than `around`, except while `is_ours()`."""
    enter = torch.autocast.__enter__

    def entered(region: torch.autocast) -> Any:
        own = region.fast_dtype if region._enabled else None
        if own != around and not is_ours():
            raise Unsupported(autocast_text(own), user_line())
        return enter(region)  # type: ignore[no-untyped-call]

    with mock.patch.object(torch.autocast, "__enter__", entered):
        yield


def refuse_model(model: nn.Module, loss: Any) -> None:
    """Raise CaptureError listing all that a graph of the model would lose, or for a wrapped model."""
    kind = type(model).__name__
    if kind in _WRAPPED:
        raise CaptureError(f"{kind} hides the model: give compile() what is inside it, model.{_WRAPPED[kind]}")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(f"{kind} has no Python to trace: give compile() the model it was made from")
    problems = [problem for path, module in model.named_modules() for problem in _module_problems(path or kind, module)]
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            problems.append(f"{name} has no shape yet; run one batch through the model first")
        elif parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            problems.append(f"{name} has a gradient hook, which a graph would lose; remove it")
    problems += _overlaps(model)
    trained = [name for name, p in loss.named_parameters() if p.requires_grad] if isinstance(loss, nn.Module) else []
    if trained:
        problems.append(
            f"the loss has parameters of its own ({', '.join(trained)}), which no state_dict of the model would hold; "
            f"make it part of the model: let forward take the target and return the loss"
        )
    if problems:
        raise CaptureError(problems[0] if len(problems) == 1 else bullets(f"{kind} cannot be captured:", problems))


def _module_problems(where: str, module: nn.Module) -> Iterator[str]:
    if isinstance(module, torch.jit.ScriptModule):
        yield f"{where} was made by torch.jit and has no Python to trace; use the module it was made from"
    if isinstance(module, nn.SyncBatchNorm):
        yield f"{where} is an nn.SyncBatchNorm, which talks to process groups of its own; use nn.BatchNorm"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        kind = type(module).__name__
        yield from (f"{where} {problem}; use nn.{kind} without" for problem in table_problems(vars(module)))
    for name, _ in module.named_children():
        if hasattr(nn.Module, name):
            yield f"{where} has a child named {name!r}, which hides nn.Module.{name}; rename it"
    for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
        if isinstance(value, torch.Tensor) and (found := unusual(value)):
            yield f"{where}.{name} is {found[0]}, which programs cannot hold; keep it dense ({name}{found[1]})"
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            yield (
                f"{where}.{name} was computed from parameters outside of forward, so the model cannot be copied; "
                f"compute it in forward (torch.nn.utils.parametrizations.weight_norm in place of "
                f"torch.nn.utils.weight_norm)"
            )


def unusual(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What a tensor is that has no plain memory, and what makes one with it; None for any other."""
    if tensor.is_nested:
        return "a nested tensor", ".to_padded_tensor(0.0)"
    if tensor.is_quantized:
        return "a quantized tensor", ".dequantize()"
    if tensor.layout is not torch.strided:
        return f"{'an MKLDNN' if tensor.is_mkldnn else 'a sparse'} tensor", ".to_dense()"
    return None


def _overlaps(model: nn.Module) -> Iterator[str]:
    """Trainable parameters whose memory other tensors of the model share, though they are other objects."""
    owned = dict(model.named_parameters()) | dict(model.named_buffers()) | plain_tensors(model)
    by_storage: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in owned.items():
        if not is_lazy(tensor) and tensor.layout is torch.strided and tensor.numel():
            start = int(tensor.storage_offset())
            end = start + sum((n - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((start, end, name))
    for lying in by_storage.values():
        for (_, end, one), (start, _, other) in pairwise(sorted(lying)):
            both = {id(owned[name]) for name in (one, other)}
            if start <= end and len(both) == 2 and any(owned[name].requires_grad for name in (one, other)):
                yield (
                    f"{one} and {other} are two tensors in the same memory, which ranks would train apart; make them "
                    f"one parameter (b.weight = a.weight), or compute one from the other in forward"
                )


def table_problems(options: Mapping[str, Any], own_code: bool = False) -> Iterator[str]:
    """What the options of an embedding or a gather do that ranks would do differently.

    own_code: where no table is known, whose rows ranks could exchange.
    """
    if options.get("max_norm") is not None:
        yield "has max_norm, which writes into its weight: ranks would differ"
    if options.get("sparse_grad") or (own_code and options.get("sparse")):
        yield "has sparse gradients, which ranks cannot sum"
    if options.get("scale_grad_by_freq"):
        yield "has scale_grad_by_freq, which counts indices over the whole batch: ranks would differ"


@contextmanager
def no_python_randomness(name: str) -> Iterator[None]:
    """Raise Unsupported when the code inside draws from the random generators of Python or numpy."""
    before = _generator_states()
    yield
    if drawn := [name for name, state in _generator_states().items() if state != before.get(name)]:
        raise Unsupported(
            f"forward draws numbers from {' and '.join(drawn)}, and a graph would keep those of one call; draw them "
            f"with the data and pass them as an input",
            name,
        )


def _generator_states() -> dict[str, object]:
    """The states of the random generators of Python and numpy, by name."""
    numpy = sys.modules.get("numpy")
    states: dict[str, object] = {"Python's random": random.getstate()}
    if numpy is not None:
        _, keys, position, *_ = numpy.random.get_state()
        states["numpy.random"] = keys.tobytes(), position
    return states
