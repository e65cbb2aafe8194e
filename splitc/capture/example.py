"""One data-parallel rank's batch by name, with the loss: a model is traced, validated and verified on it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from splitc.capture.proxy import leaves
from splitc.capture.refusals import refuse_model
from splitc.errors import CaptureError

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
"""What users give: a tensor, a tuple of tensors, or a dict of keyword arguments; dim 0 is the batch."""

Loss = Callable[..., Tensor] | nn.Module | None
"""A function of (output, *targets) or a module; None where the model returns the loss."""

LOSS = "loss"  # the name under which a loss module's buffers appear beside the model's


@dataclass(frozen=True, eq=False)
class Example:
    """A batch bound to the parameters of `model.forward`, and the loss with its targets.

    inputs: arguments by name, plain values included; positional: those that forward takes by position only.
    targets: by name, in the order in which the loss takes them.
    """

    inputs: Mapping[str, Any]
    targets: Mapping[str, Any]
    loss: Loss
    positional: tuple[str, ...] = ()

    @classmethod
    def bind(cls, model: nn.Module, inputs: Inputs, target: Any = None, loss: Loss = None) -> Example:
        """Bind a batch as users give it.  target: a tensor or a tuple of them.

        Raises CaptureError when the model cannot be captured, when forward does not take the inputs, or when the
        tensors disagree about the batch.
        """
        refuse_model(model, loss)
        arguments = _arguments(model, inputs)
        parameters = inspect.signature(model.forward).parameters
        positional = tuple(n for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY and n in arguments)
        example = cls(arguments, _targets(target, arguments), loss, positional)
        example._require_batch()
        example._require_pair()
        return example

    @cached_property
    def values(self) -> dict[str, Any]:
        """Inputs and targets by name."""
        return {**self.inputs, **self.targets}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors among the values: the inputs of the program, in their order."""
        return {name: value for name, value in self.values.items() if isinstance(value, Tensor)}

    @property
    def batch(self) -> int:
        """How many examples it holds."""
        return next(iter(self.tensors.values())).shape[0]

    def rows(self, rows: slice | Sequence[int]) -> dict[str, Any]:
        """The values with these rows of every tensor, detached."""
        return {**self.values, **{name: tensor[rows].detach() for name, tensor in self.tensors.items()}}

    def output(self, model: nn.Module, values: Mapping[str, Any]) -> Any:
        """`model` called on copies of `values`, which stand in for the inputs of the same names.

        Copies, since a forward may write into its inputs.
        """
        given = {name: values.get(name, value) for name, value in self.inputs.items()}
        arguments = {name: value.clone() if type(value) is Tensor else value for name, value in given.items()}
        positional = [arguments.pop(name) for name in self.positional]
        return model(*positional, **arguments)

    def loss_of(self, output: Any, values: Mapping[str, Any]) -> Any:
        """The loss of an output of the model and of the targets among `values`."""
        return output if self.loss is None else self.loss(output, *(values[name] for name in self.targets))

    def to(self, dtype: torch.dtype) -> Example:
        """The example with floating-point tensors, and a copy of the loss, in another precision."""

        def converted(values: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: value.to(dtype) if isinstance(value, Tensor) and value.dtype.is_floating_point else value
                for name, value in values.items()
            }

        loss = copy.deepcopy(self.loss).to(dtype) if isinstance(self.loss, nn.Module) else self.loss
        return replace(self, inputs=converted(self.inputs), targets=converted(self.targets), loss=loss)

    def root(self, model: nn.Module) -> nn.Module:
        """A shallow copy of the model, with a loss module (its class weights, say) as a further child.

        Raises CaptureError when the model has an attribute of that name.
        """
        root = nn.Module()
        root.__dict__ = dict(model.__dict__)
        root.__class__ = type(model)
        root._modules = dict(model._modules)
        if isinstance(self.loss, nn.Module):
            if not hasattr(model, LOSS):
                root._modules[LOSS] = self.loss
            elif any(True for _ in self.loss.buffers()):
                raise CaptureError(
                    f"the model has an attribute {LOSS!r}, which is also the loss module's name; rename it or pass "
                    f"the loss as a function"
                )
        return root

    def _require_batch(self) -> None:
        if self.tensors.keys() <= self.targets.keys():
            raise CaptureError("the example has no tensor; give example=(tensor, ...)")
        scalar = [name for name, tensor in self.tensors.items() if tensor.dim() == 0]
        if scalar:
            raise CaptureError(f"the input {scalar[0]} is a 0-d tensor; dim 0 of every input must be the batch")
        sizes = {name: tensor.shape[0] for name, tensor in self.tensors.items()}
        if set(sizes.values()) != {self.batch}:
            listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
            raise CaptureError(
                f"the example's tensors disagree about the batch: {listed} rows; dim 0 must be the batch in all"
            )
        if self.batch == 0:
            raise CaptureError("the example batch is empty; give at least one example")

    def _require_pair(self) -> None:
        if self.loss is None and self.targets:
            raise CaptureError(
                "a target is given but no loss; give loss=..., or let the model return it and pass the target as one "
                "of its inputs"
            )
        if self.loss is not None and not self.targets:
            raise CaptureError("a loss is given but no target; give target=..., one row for each example")


def _arguments(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """The inputs by the names of `model.forward`'s parameters."""
    signature = inspect.signature(model.forward)
    try:
        if isinstance(inputs, Mapping):
            bound = signature.bind(**inputs)
        elif isinstance(inputs, (tuple, list)):
            bound = signature.bind(*inputs)
        else:
            bound = signature.bind(inputs)
    except TypeError as error:
        raise CaptureError(
            f"the example does not fit {type(model).__name__}.forward{signature}: {error}; give example=(tensor, ...) "
            f"or a dict of keyword arguments"
        ) from error
    flat: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            flat.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            raise CaptureError(f"{type(model).__name__}.forward takes *{name}: give it named parameters to compile it")
        else:
            flat[name] = value
    for name, value in flat.items():
        if not isinstance(value, Tensor) and any(isinstance(leaf, Tensor) for leaf in leaves(value)):
            raise CaptureError(
                f"the input {name} is a {type(value).__name__} of tensors: let {type(model).__name__}.forward take "
                f"each tensor as a parameter"
            )
    return flat


def _targets(target: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The target tensors by name: `target`, or `target0`, `target1`, ..."""
    if target is None:
        return {}
    targets = {"target": target} if isinstance(target, Tensor) else {f"target{i}": t for i, t in enumerate(target)}
    for name in targets:
        if name in inputs:
            raise CaptureError(f"the model's input {name!r} has the name that splitc gives the target; rename it")
    return targets
