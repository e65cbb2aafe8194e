"""Find what modules keep of a batch in plain attributes for the next one: recurrent state, a memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from splitc.capture.trace.proxy import is_proxy, leaves
from splitc.runtime.nested import tensors

_OF_MODULES = {"_parameters", "_buffers", "_modules"}


class _Reads(TorchFunctionMode):
    """Notes which of some tensors, by `id`, torch functions are given."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names, self.found = names, set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= {self.names[id(value)] for value in leaves((args, kwargs)) if id(value) in self.names}
        return func(*args, **(kwargs or {}))


def kept_attributes(models: Sequence[nn.Module], again: Callable[[], object]) -> dict[str, bool]:
    """The attributes in which a forward leaves tensors of the batch that the next uses -> whether all have its rows.

    models: one as it was, and three that ran, on some examples, on more, on others.  again: runs the first of these.
    """
    was, ran, more, others = (dict(_held(model)) for model in models)
    same = {path for path, tensor in ran.items() for seen in (was, others) if _is_same(tensor, seen.get(path))}
    left = {path: tensor for path, tensor in ran.items() if path not in same}
    with _Reads({id(tensor): path[0] for path, tensor in left.items()}) as reads:
        if left:
            again()
    shapes = {path: path in more and more[path].shape != tensor.shape for path, tensor in left.items()}
    return {name: all(differs for path, differs in shapes.items() if path[0] == name) for name in reads.found}


def left_behind(root: nn.Module) -> dict[str, Any]:
    """The attributes that hold traced tensors after a forward -> one of these."""
    attributes = ((f"{path}.{name}".lstrip("."), v) for path, m in root.named_modules() for name, v in vars(m).items())
    return {name: value for name, tree in attributes for value in leaves(tree) if is_proxy(value)}


def _held(root: nn.Module) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """The tensors in attributes of modules, by name and the path inside."""
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_MODULES:
                yield from tensors(value, (f"{path}.{name}".lstrip("."),))


def _is_same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other)


def train_a_little(model: nn.Module) -> None:
    """Change what trains, so that a moving average of it is seen to change, which may begin as its copy."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float32) - 0.5
                parameter.add_((1e-2 * noise * parameter.abs().mean()).to(parameter))
