"""What a user says of the division of a batch: tensors that are whole on every rank, or a function that takes examples.

Sizes of tensors that a function takes may follow from the data (jagged ones); of such a model no graph is traced, and
a rank runs it on its own part alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from splitc.errors import CaptureError
from splitc.ir.program import Program
from splitc.runtime.bags import divided
from splitc.runtime.nested import DICTS, ROWS, SIZES, VALUES, Path, at, packed, replaced
from splitc.runtime.nested import tensors as tensors_of

Batch = Mapping[str, int | None] | Callable[[Any, int, int], Any] | None
"""Tensor -> the dim of its examples, None where it is whole on every rank; or a function of (batch, a, b)."""

FEWEST = 3
"""Examples on parts of which a division is compared with the whole."""


@dataclass(frozen=True, eq=False)
class Division:
    """The user's function, and what it was seen to do.

    given: the batch that it takes; paths: where tensors are in it, by name.  Others have a row for each example.
    number: examples of the batch.  loose: tensor -> its shape, with -2 for sizes that follow from the data.
    """

    function: Callable[[Any, int, int], Any]
    given: Any
    paths: Mapping[str, Path]
    number: int = 0
    loose: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def part(self, tensors: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """The tensors of some examples of a batch."""
        found = self.function(replaced(self.given, {p: tensors[n] for n, p in self.paths.items()}), first, last)
        rows = {name: tensor[first:last] for name, tensor in tensors.items()}
        return {**rows, **{name: at(found, path) for name, path in self.paths.items()}}


def examples_of(program: Program, tensors: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    """Some examples of every tensor, in memory as all of them are."""
    if program.part is not None:
        return program.part(tensors, first, last)
    dims = {each.name: each.spec.batch_dim for each in program.inputs}
    found = {n: t if (dim := dims[n]) is None else t.narrow(dim, first, last - first) for n, t in tensors.items()}
    return {name: part.contiguous() if tensors[name].is_contiguous() else part for name, part in found.items()}


def division_of(
    function: Callable[[Any, int, int], Any],
    tensors: Mapping[str, Tensor],
    given: Sequence[tuple[Any, Mapping[str, Path]]],
) -> Division | None:
    """The division of an example's tensors by a function; None where it takes their rows, as any batch is divided.

    given: batches that the function may expect, with the paths of their tensors: of the first that it takes.
    Raises CaptureError where it gives no parts of the example.
    """
    refused = ""
    for value, paths in given:
        made = Division(function, value, paths)
        try:
            one, two = made.part(tensors, 0, 1), made.part(tensors, 0, 2)
        except Exception as error:
            refused = refused or f"fails on example 0 of the batch: {type(error).__name__}: {error}"
            continue
        wrong = [name for name, tensor in tensors.items() if not _is_like(one[name], tensor)]
        if not wrong:
            break
        refused = refused or f"gives no tensor {wrong[0]} like the example's, of as many dims and its dtype"
    else:
        raise CaptureError(f"the function batch= {refused}; it takes (batch, a, b), and returns examples a to b of it")
    grown = (
        (tensors[n].shape[0], one[n].shape[0], two[n].shape[0]) for n in reversed(list(tensors)) if tensors[n].dim()
    )
    number = next((whole for whole, a, b in grown if (a, b) == (1, 2)), 0)
    if number < FEWEST:
        raise CaptureError(
            f"{number or 'no'} examples are divided: give an example with {FEWEST} or more, and a tensor or target "
            f"with a row for each"
        )
    parts = {bounds: made.part(tensors, *bounds) for bounds in ((0, number), (0, 1), (1, 2), (1, number))}
    for name, tensor in tensors.items():
        if not torch.equal(whole := parts[0, number][name], tensor):
            raise CaptureError(
                f"the function batch= gives another {name} for all {number} examples, {tuple(whole.shape)}, than the "
                f"batch has, {tuple(tensor.shape)}; of examples 0 to {number} it must return the batch itself"
            )
    loose = {
        name: tuple(
            n if all(each[name].shape[d] == n for each in parts.values()) else -2 for d, n in enumerate(t.shape)
        )
        for name, t in tensors.items()
        if not (t.dim() and all(torch.equal(part[name], t[a:b]) for (a, b), part in parts.items()))
    }
    return replace(made, number=number, loose=loose) if loose else None


def with_bags(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with rows for bags of one size that offsets divide, as `divided` makes them; unchanged without such."""
    found = {path: tensor for path, tensor in tensors_of(inputs) if tensor.dim()}
    steps = {path: int(t[..., 1].max()) for path, t in found.items() if are_offsets(t)}
    steps = {path: n for path, n in steps.items() if torch.equal(found[path].diff(), n + 0 * found[path][..., 1:])}
    lengths = {t.shape[-1] for path, t in found.items() if path not in steps and not t.is_floating_point()}
    keys, sizes = dict[Path, str](), dict[int, int]()
    for path, step in steps.items():
        number = found[path].shape[-1]
        kinds = [(kind, n * step) for kind, n in (("starts", number), ("bounds", number - 1)) if n * step in lengths]
        for kind, length in kinds[:1]:
            keys[path], sizes[length] = f"bag_{kind}_{step}", step
    for path, tensor in found.items():
        size = sizes.get(length := tensor.shape[-1], 1)
        if path not in keys and size > 1 and length // size not in tensor.shape:
            keys[path] = f"bag_rows_{size}"
    made = {path: {key: divided(found[path], key)} for path, key in keys.items()}
    return {name: replaced(value, made, (name,)) for name, value in inputs.items()}


def are_offsets(tensor: Tensor) -> bool:
    """Whether whole numbers that begin with zero and do not fall stand along the last dim."""
    is_whole = tensor.dtype in (torch.int32, torch.int64) and tensor.device.type != "meta" and tensor.dim() > 0
    is_long = is_whole and tensor.shape[-1] > 1 and tensor.numel() > 0
    return is_long and not tensor[..., 0].any() and bool((tensor.diff() >= 0).all()) and bool(tensor[..., -1].all())


def packed_lists(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with tensors of fixed number for lists of tensors or dicts, if these have an element for each example.

    Raises CaptureError for other than tensors in the dicts.
    """
    found = ((name, value) for name, value in inputs.items() if isinstance(value, (list, tuple)) and value)
    lists = {name: value for name, value in found if isinstance(value[0], (Tensor, dict))}
    rows = [value for value in inputs.values() if isinstance(value, Tensor)] * bool(lists)
    is_same = len({len(value) for value in (*lists.values(), *rows)}) == 1
    return {**inputs, **({name: _packed(name, value) for name, value in lists.items()} if is_same else {})}


def _packed(name: str, value: Sequence[Any]) -> dict[str, Any]:
    if all(isinstance(each, dict) and each.keys() == value[0].keys() for each in value):
        return {DICTS: {key: _packed(f"{name}.{key}", each) for key, each in packed(value, DICTS).items()}}
    if not all(isinstance(each, Tensor) and each.dim() == value[0].dim() for each in value):
        kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in value))
        raise CaptureError(
            f"the elements of {name} hold {kinds}: give tensors of as many dims, or dicts of the same keys"
        )
    alike = len({each.shape for each in value}) == 1
    return {key: packed(value, key) for key in ((ROWS,) if alike else (VALUES, SIZES))}


def of_lists(tensors: Mapping[str, Tensor], paths: Mapping[str, Path]) -> Division:
    """The division of packed lists: element i of each is example i."""
    names = {path: name for name, path in paths.items()}
    sizes = {name: names[*path[:-1], SIZES] for name, path in paths.items() if path[-1] == VALUES}
    own = {name: (name,) for pair in sizes.items() for name in pair}
    given = {name: tensors[name] for name in own}

    def examples(batch: Any, first: int, last: int) -> Any:
        found = {each: batch[each][first:last] for each in sizes.values()}
        for name, each in sizes.items():
            ends = [0, *batch[each].prod(1).cumsum(0).tolist()]
            found[name] = batch[name][ends[first] : ends[last]]
        return found

    number = len(next(tensor for name, tensor in tensors.items() if name not in sizes))
    return division_of(examples, tensors, [(given, own)]) or Division(examples, given, own, number)


def whole_dims(
    said: Mapping[str, Any], paths: Mapping[str, Path], tensors: Mapping[str, Tensor]
) -> dict[str, int | None]:
    """The dims that a user gives, by tensor.  Raises CaptureError, which says what is wrong."""
    found: dict[str, int | None] = {}
    for key, dim in said.items():
        names = [name for name, path in paths.items() if key in (name, path[0])]
        if not names:
            raise CaptureError(f"batch= names {key}, and the example has {', '.join(paths)}")
        for name in names:
            dims = tensors[name].dim()
            if dim is not None and (type(dim) is not int or not -dims <= dim < dims):
                raise CaptureError(
                    f"batch= gives {dim!r} for {name}, which has {dims} dims: give the dim of its examples, or None "
                    f"where every rank has all of it"
                )
            found[name] = dim if dim is None else dim % dims
    if len(found) == len(tensors) and not any(dim is not None for dim in found.values()):
        raise CaptureError("batch= says that every tensor is whole on every rank, which leaves no examples to divide")
    return found


def batches_given(
    inputs: Mapping[str, Any], targets: Mapping[str, Any], positional: bool, paths: Mapping[str, Path]
) -> Iterator[tuple[Any, Mapping[str, Path]]]:
    """A batch as a worker takes it, inputs and targets; the inputs alone; and one input alone; each with its paths."""
    own = {name: path for name, path in paths.items() if path[0] in inputs}
    values = tuple(inputs.values()) if positional else (dict(inputs),)
    places: dict[str, Path] = (
        {key: (str(k),) for k, key in enumerate(inputs)} if positional else {key: ("0", key) for key in inputs}
    )
    places |= {key: (str(len(values) + k),) for k, key in enumerate(targets)}
    yield (*values, *targets.values()), {name: (*places[path[0]], *path[1:]) for name, path in paths.items()}
    if positional:
        yield values, {name: (*places[path[0]], *path[1:]) for name, path in own.items()}
    else:
        yield values[0], own
    if len(inputs) == 1:
        yield next(iter(inputs.values())), {name: path[1:] for name, path in own.items()}


def _is_like(part: Any, tensor: Tensor) -> bool:
    return isinstance(part, Tensor) and (part.dim(), part.dtype) == (tensor.dim(), tensor.dtype)
