"""One data-parallel rank's batch by name, with the loss: a model is traced, validated and verified on it."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from splitc.capture.example.division import (
    Batch,
    Division,
    are_offsets,
    batches_given,
    division_of,
    of_lists,
    packed_lists,
    whole_dims,
    with_bags,
)
from splitc.capture.example.loss_value import SummedLosses, losses_in, takes, total
from splitc.capture.refusals import refuse_model, unusual
from splitc.errors import CaptureError
from splitc.runtime.bags import ONE_SIZE
from splitc.runtime.nested import Path, at, replaced, tensors, unpacked

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
"""What users give: a tensor, a tuple of arguments, or a dict of keyword arguments; an argument may be nested."""

Loss = Callable[..., Any] | nn.Module | Sequence[Callable[..., Any]] | None
"""A function of (output, *targets) or a module, or several that are summed; None where the model returns the loss."""

LOSS = "loss"  # the name under which a loss module's buffers appear beside the model's


@dataclass(frozen=True, eq=False)
class Example:
    """A batch bound to the parameters of `model.forward`, and the loss with its targets.

    inputs: arguments by name, plain and nested values included; positional: those that are given by position.
    targets: by name, in the order in which the loss takes them.  batch_dims: of the tensors that do not have it first,
    None of those that are whole on every rank; is_said: by the user.  division: a function that takes examples.
    """

    inputs: Mapping[str, Any]
    targets: Mapping[str, Any]
    loss: Callable[..., Any] | nn.Module | None
    positional: tuple[str, ...] = ()
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    is_said: bool = False
    division: Division | None = None

    @classmethod
    def bind(
        cls, model: nn.Module, inputs: Inputs, target: Any = None, loss: Loss = None, batch: Batch = None
    ) -> Example:
        """Bind a batch as users give it.  target: a tensor or a tuple of them.  batch: how it is divided.

        Raises CaptureError when the model cannot be captured, when forward does not take the inputs, or when the
        tensors disagree about the batch.
        """
        loss = SummedLosses(loss) if isinstance(loss, Sequence) else loss
        refuse_model(model, loss)
        arguments, positional = _arguments(model, inputs)
        example = cls(arguments, _targets(target, arguments, loss), loss, positional)
        example._require_pair()
        if batch is not None:
            return example._divided(batch)
        refused, in_rows = None, replace(example, inputs=with_bags(arguments))
        has_bags = any(isinstance(module, nn.EmbeddingBag) for module in model.modules())
        for given in (in_rows, example) if has_bags else (example, in_rows):
            try:
                return given._laid_out()
            except CaptureError as error:
                refused = refused or error
        example = replace(example, inputs=packed_lists(arguments))
        if refused and all(example.inputs[name] is value for name, value in arguments.items()):
            raise refused
        return replace(example, division=of_lists(example.tensors, example.paths), is_said=True)

    @cached_property
    def paths(self) -> dict[str, Path]:
        """Where each input of the program is among the arguments and targets: `batch_image` -> ("batch", "image")."""
        found: dict[str, Path] = {}
        for path, _ in tensors({**self.inputs, **self.targets}):
            stem = name = path[0] if len(path) == 1 else re.sub(r"\W", "_", "_".join(path))
            taken = {*found, *(self.inputs if len(path) > 1 else ())}
            number = 0
            while name in taken:
                name, number = f"{stem}_{number}", number + 1
            found[name] = path
        return found

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors among inputs and targets, by name: the inputs of the program, in their order."""
        values = {**self.inputs, **self.targets}
        return {name: at(values, path) for name, path in self.paths.items()}

    @property
    def batch(self) -> int:
        """How many examples it holds."""
        if self.division is not None:
            return self.division.number
        dims = ((tensor, self.batch_dims.get(name, 0)) for name, tensor in self.tensors.items())
        return next(tensor.shape[dim] for tensor, dim in dims if dim is not None)

    def rows(self, rows: slice | Sequence[int]) -> dict[str, Any]:
        """These examples of every tensor, detached."""
        if self.division is not None:
            numbers = sorted(
                range(self.batch)[k] for k in (range(self.batch)[rows] if isinstance(rows, slice) else rows)
            )
            return self.division.part(self.tensors, numbers[0], numbers[-1] + 1)
        dims = {name: self.batch_dims.get(name, 0) for name in self.tensors}
        index = {name: (...,) if dim is None else (*(slice(None),) * dim, rows) for name, dim in dims.items()}
        return {name: tensor[index[name]].detach() for name, tensor in self.tensors.items()}

    def of(self, rows: Sequence[int]) -> Example:
        """The example with these examples."""
        values = self.rows(rows)
        return replace(self, inputs=self._with(self.inputs, values), targets=self._with(self.targets, values))

    def output(self, model: nn.Module, values: Mapping[str, Any]) -> Any:
        """`model` called on copies of `values`, which stand in for the tensors of the same names.

        Copies, since a forward may write into its inputs.
        """
        given = {**self.tensors, **values}
        given = {n: v.clone() if type(v) is Tensor else v for n, v in given.items()}
        arguments = {name: unpacked(value) for name, value in self._with(self.inputs, given).items()}
        return model(*[arguments.pop(name) for name in self.positional], **arguments)

    def loss_of(self, output: Any, values: Mapping[str, Any]) -> Any:
        """The loss of an output of the model and of the targets among `values`.  Raises CaptureError for no loss."""
        return total(self.losses_of(output, values))

    def losses_of(self, output: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        """The losses that are summed, by name; most often one."""
        if self.loss is None:
            return losses_in(output, "the model")
        return losses_in(self.loss(output, *self._with(self.targets, values).values()), "the loss function")

    def _with(self, trees: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments or targets with `values` in place of their tensors."""
        new = {path: values[name] for name, path in self.paths.items() if name in values}
        return {name: replaced(tree, new, (name,)) for name, tree in trees.items()}

    def to(self, dtype: torch.dtype) -> Example:
        """The example with floating-point tensors, and a copy of the loss, in another precision."""
        wide = {name: t.to(dtype) if t.dtype.is_floating_point else t for name, t in self.tensors.items()}
        loss = copy.deepcopy(self.loss).to(dtype) if isinstance(self.loss, nn.Module) else self.loss
        return replace(self, inputs=self._with(self.inputs, wide), targets=self._with(self.targets, wide), loss=loss)

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

    def _divided(self, batch: Batch) -> Example:
        """The example divided as the user says.  Raises CaptureError where it cannot be."""
        if callable(batch):
            given = batches_given(self.inputs, self.targets, bool(self.positional), self.paths)
            division = division_of(batch, self.tensors, list(given))
            return replace(self, division=division, is_said=True) if division else self._laid_out()
        if not isinstance(batch, Mapping):
            kind = type(batch).__name__
            raise CaptureError(f"batch= is {kind}; give a dict of dims by name, or a function of (batch, a, b)")
        dims = whole_dims(batch, self.paths, self.tensors)
        sizes = {n: t.shape[d] for n, t in self.tensors.items() if (d := dims.get(n, 0)) is not None and t.dim()}
        if len(set(sizes.values())) != 1 or 0 in sizes.values():
            listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
            raise CaptureError(
                f"the example's tensors disagree about the batch: {listed or 'none has any'} rows; give batch= for "
                f"each that has its examples in another dim, or None where it is whole on every rank"
            )
        return replace(self, batch_dims={name: dim for name, dim in dims.items() if dim != 0}, is_said=True)

    def _laid_out(self) -> Example:
        """The example with batch dimensions that agree in size.  Raises CaptureError where there are none."""
        if all(path[0] in self.targets for path in self.paths.values()):
            raise CaptureError("the example has no tensor; give example=(tensor, ...)")
        if scalar := [name for name, tensor in self.tensors.items() if tensor.dim() == 0]:
            raise CaptureError(f"the input {scalar[0]} is a 0-d tensor; dim 0 of every input must be the batch")
        found = next(layouts(self.tensors), None)
        if found is None:
            sizes = {name: tensor.shape[0] for name, tensor in self.tensors.items()}
            listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
            raise CaptureError(
                f"the example's tensors disagree about the batch: {listed} rows, and no other size is in all of them; "
                f"dim 0 must be the batch, or one dim of the same size in each; batch= says how others are divided"
                f"{f'. {ONE_SIZE}' * any(map(are_offsets, self.tensors.values()))}"
            )
        if 0 in self.tensors[next(iter(self.tensors))].shape[:1]:
            raise CaptureError("the example batch is empty; give at least one example")
        return replace(self, batch_dims=found)

    def _require_pair(self) -> None:
        for name, tensor in self.tensors.items():
            if kind := unusual(tensor):
                raise CaptureError(f"{name} is {kind[0]}, whose examples ranks cannot take apart; give {name}{kind[1]}")
        if self.loss is None and self.targets:
            raise CaptureError(
                "a target is given but no loss; give loss=..., or let the model return it and pass the target as one "
                "of its inputs"
            )
        if self.loss is not None and not self.targets and not takes(self.loss, 1):
            raise CaptureError(
                "a loss is given but no target, and it takes more than the output; give target=..., one row for each "
                "example, or where the output holds all that the loss takes, loss=lambda output: ...(*output)"
            )


def inputs_and_target(model: nn.Module, loss: Any, batch: Any) -> tuple[Any, Any]:
    """A batch (inputs..., targets...) as `compile` takes it: one target, else as few as forward and the loss take.

    Raises CaptureError where they do not take it.
    """
    given = [batch] if isinstance(batch, (Tensor, Mapping)) else list(batch)
    for count in (len(given) - 1, *range(len(given), 0, -1)):
        inputs, targets = given[:count], given[count:]
        by_name = count == 1 and isinstance(inputs[0], Mapping)
        last = targets[0] if len(targets) == 1 else tuple(targets)
        number = len(last) if type(last) in (tuple, list) else 1
        needed = any(takes(loss, 1 + n) for n in (number, len(targets)))
        needed = needed and (len(targets) < 2 or not takes(loss, number))
        if count > 0 and needed and (by_name or takes(model, count)):
            return inputs[0] if by_name else inputs, last if targets else None
    raise CaptureError(
        f"with a loss the first batch must be inputs and a target, (inputs..., target), or inputs alone for a loss of "
        f"the output; {type(model).__name__}.forward{inspect.signature(model.forward)} and the loss take no such "
        f"division of its {len(given)} parts"
    )


def layouts(found: Mapping[str, Tensor]) -> Iterator[dict[str, int]]:
    """The batch dimensions that tensors may have: 0 of all, or their first, or last, ones of a size that all have."""
    if len({tensor.shape[0] for tensor in found.values()}) == 1:
        yield {}
    shared = set.intersection(*(set(tensor.shape) for tensor in found.values())) - {0, 1}
    for size in sorted(shared, key=lambda size: -sum(tensor.shape[0] == size for tensor in found.values())):
        every = {name: [d for d, n in enumerate(tensor.shape) if n == size] for name, tensor in found.items()}
        for end in (0, -1):
            dims = {name: each[end] for name, each in every.items()}
            if any(dims.values()):
                yield {name: dim for name, dim in dims.items() if dim}


def _arguments(model: nn.Module, inputs: Inputs) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The inputs by the names of `model.forward`'s parameters, and those of them that are given by position."""
    signature = inspect.signature(model.forward)
    try:
        given = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        bound = signature.bind(**inputs) if isinstance(inputs, Mapping) else signature.bind(*given)
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
            flat.update((f"{name}_{k}", each) for k, each in enumerate(value))
        else:
            flat[name] = value
    return flat, () if isinstance(inputs, Mapping) else tuple(flat)


def _targets(target: Any, inputs: Mapping[str, Any], loss: Loss) -> dict[str, Any]:
    """The targets by name: `target`, or `target0`, `target1`, ... of a tuple that the loss does not take as one."""
    if target is None:
        return {}
    several = type(target) in (tuple, list) and (takes(loss, 1 + len(target)) or not takes(loss, 2))
    targets = {f"target{i}": t for i, t in enumerate(target)} if several else {"target": target}
    for name in targets:
        if name in inputs:
            raise CaptureError(f"the model's input {name!r} has the name that splitc gives the target; rename it")
    return targets
