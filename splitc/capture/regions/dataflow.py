"""Follow which examples each element of each tensor depends on, while the user's own code runs.

    h = x.relu()                    bits 1, 2, 4 in the rows of three examples
    m = h.mean()                    bits 7: of several examples
    h * 3 if float(m) > 0.3 else h  a number of several examples leaves tensors: Python may do anything with it

A storage has a byte for each of its elements, a bit for each example, so that views share it as they share memory.
What an operation that is not known here makes of several examples is UNSURE: it may not leave tensors, and
measurement tells whether it treats them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from splitc.capture.refusals import table_problems
from splitc.capture.source_lines import user_line
from splitc.errors import CaptureError
from splitc.ir.torch_ops import ops_with
from splitc.runtime.generators import same_generators
from splitc.runtime.seeded.table import form_of

UNSURE = 128
_FORGED = 64  # numbers in one run, so that a loop that waits for one to change ends
_EXITS = {"tolist", "numpy", "__array__", "data_ptr", "__dlpack__", "untyped_storage", "storage"}
_SIZES = {"shape", "size", "__len__", "numel", "nelement"}
_MADE = ("empty", "new_", "zero", "ones", "full", "rand", "arange", "fill")
_PLACED = ("bincount", "histc", "histogram", "index_add", "index_copy", "index_fill", "index_put", "put", "scatter")
_ACROSS = ops_with("across")


class Flow(TorchDispatchMode):
    """Bits of all tensors.  left: where a number of several examples left tensors first, and how.

    alone: whether one of a single example did.  forged: examples whose numbers are `number` outside of tensors.
    draws: how often random numbers were drawn.
    """

    def __init__(self, forged: int = 0, number: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left, self.alone, self.draws, self.busy = "", 0, 0, False
        self._forged, self._number = forged, number
        self._held: dict[int, tuple[Any, Tensor]] = {}  # with the storage, so that no other one takes its place
        self._sizes: dict[int, int] = {}

    def bits(self, value: Tensor) -> Tensor:
        _, held = self._held.get(_key(value), (None, torch.zeros((), dtype=torch.uint8, device=value.device)))
        if held.numel() * value.element_size() != value.untyped_storage().nbytes():
            found = _any(held) | UNSURE * (held.numel() > 1)  # none, or seen in another dtype, or resized
            return found.expand(value.shape)
        return held.as_strided(value.shape, value.stride(), value.storage_offset())

    def mark(self, value: Tensor, bits: Tensor) -> None:
        if _key(value) not in self._held:
            storage = value.untyped_storage()
            base = torch.zeros(storage.nbytes() // value.element_size(), dtype=torch.uint8, device=value.device)
            self._held[_key(value)] = storage, base
        self.bits(value).copy_(bits)

    def whole(self, values: Any) -> int:
        """The bits of all that tensors hold."""
        return reduce(int.__or__, (int(_any(self.bits(t))) for t in _tensors(values)), 0)

    def sizes(self, values: Any) -> int:
        """The bits of what their sizes follow from."""
        return reduce(int.__or__, (self._sizes.get(_key(t), 0) for t in _tensors(values)), 0)

    def leaves(self, what: str, bits: int, value: Any = None) -> Any:
        """Note that a number leaves tensors; return what it is outside."""
        if bits & (bits - 1) and not self.left:
            self.left = (
                f"{user_line() or 'its loss'}: the loss couples examples: {what} leaves tensors for Python, computed "
                f"from several examples; a rank that sees a part of the batch cannot compute it"
            )
        self.alone += bool(bits) and value is not None
        if value is None or bits not in (1, 2, 4) or not bits & self._forged or self.alone > _FORGED:
            return value
        return torch.full_like(value, self._number) if isinstance(value, Tensor) else type(value)(self._number)

    def drawn(self, *values: Any) -> None:
        """Note that random numbers are drawn for tensors: by example, where they have the examples in order."""
        self.draws += 1
        if not self.left and (self.sizes(values) or not all(map(self._in_order, _tensors(values)))):
            self.left = (
                f"{user_line() or 'its loss'}: the loss couples examples: random numbers are drawn for rows that are "
                f"not all examples in their order"
            )

    def _in_order(self, value: Tensor) -> bool:
        """Whether a tensor has the three examples in order, along one of its dims; or none."""
        bits = self.bits(value)
        if not bits.any() or (bits >= UNSURE).any():
            return True
        own = bits.new_tensor([1, 2, 4])
        whole = (bits.movedim(d, -1) for d, n in enumerate(value.shape) if n % len(own) == 0)
        return any(not (each & ~own.repeat_interleave(each.shape[-1] // len(own))).any() for each in whole)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            given = [] if self.busy else _tensors((args, kwargs))
            if not any(_key(t) in self._held for t in given):
                return func(*args, **kwargs)
            bits = [self.bits(t) for t in given]
            olds = tree_map_only(Tensor, Tensor.clone, args) if func._schema.is_mutable else args
            made, whole, sizes = func(*args, **kwargs), reduce(torch.bitwise_or, map(_any, bits)), self.sizes(given)
            if torch.Tag.data_dependent_output in func.tags:
                return self.leaves("a number", int(whole), made)
            if str(func._schema.returns[0].type).endswith("[]"):
                self.leaves("a number of parts", sizes)
            if torch.Tag.dynamic_output_shape in func.tags:
                sizes |= self.whole(given[1:] or given)
            if any(isinstance(each, Tensor) and each.layout is not torch.strided for each in tree_leaves(made)):
                self.leaves("a sparse tensor", int(whole))
            results = _results(func, args, kwargs, made)
            found = [_known(func, args, kwargs, given, bits, whole, value) for value in results]
            if any(each is None for each in found):
                found = [*_measured(func, olds, kwargs, results, bits, whole)]
            for value, each in zip(results, found, strict=True):
                self.mark(value, whole if each is None else each)
                self._sizes[_key(value)] = sizes if value.dim() else 0
            return made


class Functions(TorchFunctionMode):
    """Sees what torch does without an operation: data and sizes that Python reads."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, flow, kwargs = getattr(func, "__name__", ""), self._flow, kwargs or {}
        name = func.__self__.__name__ if name == "__get__" else name
        if form_of(func, args, kwargs) is not None:
            flow.drawn(args, kwargs)
        if name in _EXITS:
            args = (flow.leaves(f"{name}()", flow.whole(args[0]), args[0]), *args[1:])
        elif name in _SIZES:
            flow.leaves("a size", flow.sizes(args[0]))
        flow.busy = func is F.one_hot and {-1} < {-1, *args[1:], *kwargs.values()}  # it checks bounds, no more
        made = func(*args, **kwargs)
        if flow.busy or func in (torch.tensor, torch.as_tensor):
            bits = flow.bits(args[0]).unsqueeze(-1) if flow.busy else torch.tensor(flow.whole(args), dtype=torch.uint8)
            flow.mark(made, bits)
            flow.busy = False
        return made


def _known(
    func: Any, args: Any, kwargs: Any, given: list[Tensor], bits: list[Tensor], whole: Tensor, value: Tensor
) -> Tensor | None:
    """The bits of a result, by what all operations of a kind do; None of another kind.

    Raises CaptureError for options that no rank may use on a part of the batch.
    """
    options = {each.name: each.default_value for each in func._schema.arguments}
    options |= dict(zip(options, args, strict=False)) | kwargs
    name, dim = func._opname.strip("_"), options.get("dim")
    dims: tuple[int, ...] = (dim,) if isinstance(dim, int) else tuple(dim or ())
    for problem in table_problems(options, own_code=True):
        raise CaptureError(f"{user_line() or 'its loss'}: {name} {problem}; leave it out")
    if name.startswith(_MADE) and len(bits) == 1:
        return torch.zeros_like(whole)
    if torch.Tag.pointwise in func.tags or name in ("to_copy", "dropout"):
        return reduce(torch.bitwise_or, bits)
    if len(bits) == 1 and dims and name not in _ACROSS and not name.endswith("_backward"):
        found = _any(bits[0], dims)
        return found if found.dim() == value.dim() else found.squeeze(dims)
    if name.startswith(_PLACED):  # where an example writes, others may write too, on other data
        places = [_any(b) for t, b in zip(given, bits, strict=True) if t.dtype == torch.int64 or name[:4] == "hist"]
        if any(place & (place - 1) for place in places):
            return bits[0] | _any(reduce(torch.bitwise_or, bits[1:]), dims) if name[:4] == "scat" else whole
    several = whole & (whole - 1) or name.endswith("_backward")  # which may put zeros around
    return None if several and torch.Tag.reduction not in func.tags else whole


def _measured(
    func: Any, args: Any, kwargs: Any, results: list[Tensor], bits: list[Tensor], whole: Tensor
) -> Iterator[Tensor]:
    """The bits of results: what changes when the elements with a bit do."""
    found = [torch.zeros(value.shape, dtype=torch.uint8, device=value.device) for value in results]
    base: list[Tensor] = []
    for mask in (0, 1, 2, 4, UNSURE):  # 0: of the same values, which lie in memory as the others and so round alike
        own = iter([each & mask != 0 for each in bits])

        def changed(value: Tensor, own: Iterator[Tensor] = own) -> Tensor:
            return torch.where(next(own), _other(value), value)

        new_args, new_kwargs = tree_map_only(Tensor, changed, (args, kwargs))
        try:
            with same_generators():
                others = _results(func, new_args, new_kwargs, func(*new_args, **new_kwargs))
            base = base or others
            for each, value, new in zip(found, base, others, strict=True):
                each |= mask * ((value != new) & ~((value != value) & (new != new)))
        except Exception:  # of indices out of bounds, or results of another shape
            return ((whole | UNSURE).expand(value.shape) for value in results)
    return iter(found)


def _other(value: Tensor) -> Tensor:
    """Other values, of the same kind."""
    if value.is_floating_point() or value.is_complex():
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return value + 1 + noise.to(value)
    return ~value if value.dtype == torch.bool or not value.numel() else (value + 1) % (value.max() + 1).clamp(min=2)


def _results(func: Any, args: Any, kwargs: Any, made: Any) -> list[Tensor]:
    """The tensors that an operation has made, or written into."""
    given, named = set(map(_key, _tensors((args, kwargs)))), zip(func._schema.arguments, args, strict=False)
    written = [t for each, t in named if each.alias_info is not None and each.alias_info.is_write]
    return [*(t for t in _tensors(made) if _key(t) not in given), *written]


def _key(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor) and each.layout is torch.strided]


def _any(bits: Tensor, dims: tuple[int, ...] = ()) -> Tensor:
    """The bits along dims, which are 1 then; of all dims where none is given."""
    if not bits.numel() or not bits.dim():  # of none, zeros
        return bits.sum(dims or None, keepdim=bool(dims), dtype=bits.dtype)
    return reduce(torch.bitwise_or, ((bits & mask).amax(dims, keepdim=bool(dims)) for mask in (1, 2, 4, UNSURE)))
