"""Late multiply: replicas of a layer exchange the factors of its weight gradient, not the gradient.

The gradient of a weight (out, in) is E^T X, for inputs X (rows, in) and output errors E (rows, out).  Where the layer
is wide and the batch small, X and E of all replicas are fewer bytes than the gradient (Practical Lessons, section 2.1):
each replica gathers them, and multiplies late, once.  The gradient of a table of rows is E, added to the rows that were
looked up: its factors are E and the indices, and the weights of rows in bags.

The factors of all late-multiplied layers of one dtype travel in one gather.  It starts in backward when the last error
is there, before the layers below go backward; that of indices which are known when forward begins starts there.
`finish` waits for them and multiplies.

Its cost: every replica computes the weight gradient of all replicas' rows, n times the FLOPs of data parallelism, and
holds the gathered X and E from backward to `finish`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..collectives.deferred_gradients import add_linear_gradients, add_to_grad, rows_of, watched
from ..collectives.model_parallel import Group
from ..transport.base import Transport, Work, describe


class LateMultiply:
    """The late-multiplied layers of one rank; `ranks` are the replicas that hold the same weights.

    Raises ValueError when `ranks` do not hold this one.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        group = Group(transport, ranks)
        self.transport, self.ranks, self.index = transport, group.ranks, group.index
        self._awaited = 0  # uses whose errors are to come
        self._uses: list[_Use] = []  # those whose errors have come
        self._indices: list[_Use] = []  # what forward gave of them, in this microbatch
        self._kept: list[_Use] = []  # and in all, until it travels
        self._gathers: list[Work] = []  # under way

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, rows: Sequence[int], is_last: bool = True
    ) -> Tensor:
        """`F.linear` whose gradients of weight and bias come with `finish`, summed over the replicas.

        rows: how many rows each replica has at this use, the product of all dims of its `x` but the last.
        is_last: False in all microbatches but the last one; the factors of all travel together.
        Autograd computes the gradient of `x` only; without grad mode, where neither weight nor bias is trained and on
        a single rank this is plain `F.linear`.
        Raises ValueError when `rows` do not fit the replicas or `x`.
        """
        self._require(rows, x.numel() // max(weight.size(1), 1), f"late multiply of {describe(x)}", weight)
        parameters = [p for p in (weight, bias) if p is not None and p.requires_grad]
        if len(self.ranks) == 1 or not parameters or not torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        y = F.linear(x, weight.detach(), None if bias is None else bias.detach())
        # Under autocast the layer multiplies in y's dtype; X travels and is kept in it too.
        inputs = [x.detach().to(y.dtype)] if weight.requires_grad else []
        trained = bias if bias is not None and bias.requires_grad else None
        return self._watched(y, inputs, partial(add_linear_gradients, weight, trained), rows, is_last)

    def gather_indices(self, indices: Sequence[Tensor], rows: Sequence[Sequence[int]], is_last: bool = True) -> None:
        """Keep the indices of tables, and start to gather those of all microbatches in the last one.

        rows: how many indices each replica has, of each of these tensors.  Without grad mode nothing travels.
        """
        if len(self.ranks) == 1 or not torch.is_grad_enabled():
            return
        flat = (each.flatten().to(torch.int32, copy=True) for each in indices)
        self._indices = [_Use(lambda: None, own, [1], [(each,)]) for own, each in zip(rows, flat, strict=True)]
        self._kept += self._indices
        if is_last:
            self._gather(self._kept)
            self._kept = []

    def table(
        self,
        look_up: Callable[..., Tensor],
        weight: Tensor,
        *values: Tensor,
        rows: Sequence[int],
        is_last: bool = True,
        gathered: int | None = None,
    ) -> Tensor:
        """`look_up(indices, weight, *weights)` of the `values`, of which the table's gradient comes with `finish`.

        rows, is_last, raises: as of `linear`; a bag is one row.
        gathered: which of `gather_indices` the indices are; None: they travel with the errors.
        """
        indices, *weights = values
        y = look_up(indices, weight.detach(), *weights)
        self._require(rows, y.numel() // max(weight.size(1), 1), f"late look-up of {describe(indices)}", weight)
        if len(self.ranks) == 1 or not weight.requires_grad or not torch.is_grad_enabled():
            return look_up(indices, weight, *weights)
        of_rows = indices.reshape(-1, 1) if y.dim() > indices.dim() else indices
        factors, add = [of_rows.int(), *(each.detach() for each in weights)], partial(_add_rows, look_up, weight)
        if gathered is not None:
            factors, add = factors[1:], partial(add, self._indices[gathered])
        return self._watched(y, factors, add, rows, is_last)

    def _require(self, rows: Sequence[int], own: int, what: str, weight: Tensor) -> None:
        if len(rows) != len(self.ranks) or rows[self.index] != own:
            raise ValueError(
                f"{what} with weight {describe(weight)} on replica {self.index} of {len(self.ranks)}, but the "
                f"replicas' rows are {list(rows)}"
            )

    def _watched(
        self, y: Tensor, values: Sequence[Tensor], add: Callable[..., None], rows: Sequence[int], is_last: bool
    ) -> Tensor:
        """The output `y` of a layer whose factors are `values` and its error, of which `add` makes the gradients."""
        self._awaited += 1
        return watched(y, partial(self._arrived, is_last, partial(_Use, add, rows)), *values)

    def finish(self) -> None:
        """Add the gradients of all replicas' rows to `.grad`; the same bits on every replica.

        Call it after backward and before the optimizer steps.  Uses are processed in the order of backward; those that
        it did not reach are left out.
        """
        with torch.no_grad(), torch.autocast(self.transport.device.type, enabled=False):
            self._gather(self._uses)
            self._awaited = 0
            for work in self._gathers:
                work.wait()
            for use in self._uses:
                use.add(*use.whole())
            self._uses, self._indices, self._kept, self._gathers = [], [], [], []

    def _arrived(self, is_last: bool, use: Callable[..., _Use], *factors: Tensor) -> None:
        """Note the factors of one use, and start to gather after the last."""
        rows = list(map(rows_of, factors))
        self._uses.append(use([each.size(1) for each in rows], [(each,) for each in rows]))
        self._awaited -= 1
        if is_last and not self._awaited:
            self._gather(self._uses)

    def _gather(self, uses: Sequence[_Use]) -> None:
        """Start one gather for each dtype of the factors of those that do not travel yet."""
        packs: dict[torch.dtype, list[tuple[_Use, int]]] = defaultdict(list)
        for use in (use for use in uses if not use.travels):
            use.travels = True
            for k, (factor,) in enumerate(use.factors):
                packs[factor.dtype].append((use, k))
        for pack in packs.values():
            own = [use.factors[k][0].reshape(-1) for use, k in pack]
            sizes = [[use.rows[r] * use.widths[k] for use, k in pack] for r in range(len(self.ranks))]
            pieces = own[0].new_empty(sum(map(sum, sizes))).split([*map(sum, sizes)])
            torch.cat(own, out=pieces[self.index])
            self._gathers.append(self.transport.all_gather(list(pieces), pieces[self.index], self.ranks))
            of_ranks = (piece.split(size) for piece, size in zip(pieces, sizes, strict=True))
            for (use, k), parts in zip(pack, zip(*of_ranks, strict=True), strict=True):
                use.factors[k] = parts


@dataclass(eq=False)
class _Use:
    """One backward through one late-multiplied layer.

    add: adds the gradients of its parameters, of all replicas' factors; of indices in forward their table's use does.
    rows: of each replica.  widths: of the factors.
    factors: each as this rank's rows, (rows, width), and once it travels those of all.
    """

    add: Callable[..., None]
    rows: Sequence[int]
    widths: Sequence[int]
    factors: list[tuple[Tensor, ...]]
    travels: bool = False

    def whole(self) -> Iterator[Tensor]:
        """The factors of all replicas, one after the other."""
        for parts, width in zip(self.factors, self.widths, strict=True):
            yield torch.cat(parts).view(sum(self.rows), width)


def _add_rows(look_up: Callable[..., Tensor], weight: Tensor, first: Tensor | _Use, *factors: Tensor) -> None:
    """The gradient of a table, as torch has it where all replicas' rows are looked up.

    first: indices (rows, size of a bag).  factors: the weights of rows where there are some, E (rows, features).
    """
    *weights, errors = factors
    indices = next(first.whole()).view(len(errors), -1) if isinstance(first, _Use) else first
    leaf = weight.detach().requires_grad_()
    with torch.enable_grad():
        found = look_up(indices, leaf, *weights)
    (gradient,) = torch.autograd.grad(found, leaf, errors.view(found.shape))
    add_to_grad(weight, gradient)
