"""Name the tensors that a model reads: parameters, buffers, and constants that become buffers."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from splitc.capture.refusals import Unsupported
from splitc.capture.source_lines import name_in_user_code
from splitc.runtime.own_code import plain_tensors


class Attributes:
    """Tensors by name.

    root: the model with fake parameters.  original: the model itself, whose tensors the user's code may read too (in a
    loss that closes over the model).  constants: tensors that are neither parameter nor buffer: attributes, globals.
    """

    def __init__(self, root: nn.Module, original: nn.Module) -> None:
        self.constants: dict[str, torch.Tensor] = {}
        self.taken: dict[str, torch.Tensor] = {}  # constants of another trace of the model, whose names they keep
        self._root, self._original = root, original
        self._names = {**_names(original), **_names(root)}

    def known(self, tensor: torch.Tensor) -> str | None:
        """The name of a tensor that a module owns, or that was named before."""
        return self._names.get(id(tensor))

    def name(self, tensor: torch.Tensor) -> str:
        """The name of any tensor; an unknown one becomes a constant.  Raises Unsupported where it cannot."""
        name = self._names.get(id(tensor))
        if name is None:
            self._names[id(tensor)] = name = self._constant_name(tensor)
            self.constants[name] = tensor
        return name

    def traced(self, name: str) -> torch.Tensor:
        """The tensor by name in the traced copy: fake, or a constant."""
        tensor: torch.Tensor = self.constants[name] if name in self.constants else attrgetter(name)(self._root)
        if not isinstance(tensor, FakeTensor):
            self.constants[name] = tensor
        return tensor

    def real(self, name: str) -> torch.Tensor:
        """The tensor by name, with its data."""
        tensor: torch.Tensor = self.constants[name] if name in self.constants else attrgetter(name)(self._original)
        return tensor

    def adopt_constants(self) -> None:
        """Register the constants as buffers of the traced copy, so that generated programs hold them."""
        for name, tensor in self.constants.items():
            owner, _, last = name.rpartition(".")
            module = self._root.get_submodule(owner)
            module.__dict__.pop(last, None)
            module.register_buffer(last, tensor, persistent=False)

    def _constant_name(self, tensor: torch.Tensor) -> str:
        shape = tuple(tensor.shape)
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            raise Unsupported(
                f"a parameter of shape {shape} is used that the model does not own; assign its module to an attribute "
                f"of the model, or use nn.ModuleList, nn.ModuleDict or nn.ParameterList",
                stays=True,
            )
        if tensor.requires_grad or isinstance(tensor, FakeTensor):
            raise Unsupported(f"a tensor of shape {shape} was computed outside of forward; compute it in forward")
        name = stem = name_in_user_code(tensor) or "constant"
        number = 0
        while (
            name == "constant"
            or hasattr(self._root, name)
            or name in self.constants
            or not _is_same(self.taken.get(name, tensor), tensor)
        ):
            name, number = f"{stem}{number}", number + 1
        return name


def identifier(path: str, module: nn.Module | None = None) -> str:
    """A path as a Python name: `features.0` -> `features_0`; `0` of a Sequential -> `conv2d_0`."""
    name = "".join(c if c.isalnum() else "_" for c in path)
    if name and not name[0].isdigit():
        return name
    return f"{'value' if module is None else type(module).__name__.lower()}_{name}"


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _names(root: nn.Module) -> dict[int, str]:
    """`id` -> name of every tensor that belongs to a module: parameters, buffers and plain attributes."""
    names: dict[int, str] = {}
    plain = {name: tensor for name, tensor in plain_tensors(root).items() if not tensor.requires_grad}
    for name, tensor in (*root.named_parameters(), *root.named_buffers(), *plain.items()):
        names.setdefault(id(tensor), name)
    return names
