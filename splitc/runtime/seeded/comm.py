"""The random numbers of a rank in one role: what generated code calls in place of dropout and random functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..collectives.model_parallel import feature_widths
from ..comm.role import Part
from ..generators import seeded_generators
from ..nested import unpacked
from ..own_code import of_no_examples, with_copies
from . import kernels
from .draws import Draws, Label, Layout
from .mode import SeededRandom


class Masks(NamedTuple):
    """Draws the masks of dropout in a microbatch; of tensors and plain values alone, so that a compiler can take it.

    numbers: of the step (`kernels.dropout`).  examples: of the group.  own: of this rank.
    member, size: this rank's place in its group, and the size of that.
    """

    training: bool
    numbers: Tensor
    examples: Tensor
    own: Tensor
    member: int
    size: int

    def dropout(
        self,
        value: Tensor,
        p: float,
        *,
        draw: int,
        feature_dims: int = 0,
        features: int | None = None,
        evaluating: bool = False,
        own: bool = False,
        **where: Any,
    ) -> Tensor:
        """Dropout whose mask one process draws too (see `kernels.dropout`); outside of training only if `evaluating`.

        draw: the ordinal of the random call.  where: dim, rows, outer of its `Layout`.
        features: size of the last dim, of which `value` has a shard.  own: `value` has this rank's own examples, not
        those of its group.
        """
        if not (self.training or evaluating):
            return value
        columns = None if features is None else (sum(feature_widths(features, self.size)[: self.member]), features)
        examples = self.own if own else self.examples
        return kernels.dropout(
            value, p, self.numbers, examples, (draw,), Layout(**where, columns=columns), feature_dims
        )


class SeededComm(Part):
    """Draws for the examples and features that the rank computes."""

    def masks(self) -> Masks:
        """What draws masks in the running step and microbatch."""
        role, k = self.role, self.examples.microbatch
        training, group = role.context.training, role.group
        return Masks(training, role.numbers, role.drawn[k, False], role.drawn[k, True], group.index, group.size)

    def dropout(self, value: Tensor, p: float, **options: Any) -> Tensor:
        """`Masks.dropout`."""
        return self.masks().dropout(value, p, **options)

    def uniform(self, like: Tensor, *, draw: int, own: bool = False, **where: Any) -> Tensor:
        """Numbers in [0, 1) that one process draws too, in the shape and dtype of `like`."""
        return self._draws(own).uniform(like, (draw,), Layout(**where))

    def normal(self, like: Tensor, *, draw: int, own: bool = False, **where: Any) -> Tensor:
        """Numbers of the standard normal distribution that one process draws too, in the shape and dtype of `like`."""
        return self._draws(own).normal(like, (draw,), Layout(**where))

    @contextmanager
    def seeded(self, draw: int, draws: Sequence[tuple[Any, ...]] = (), own: bool = False) -> Iterator[SeededRandom]:
        """Around the call of a module that runs the user's own code, whose random calls are labelled (draw, 0), ...

            with comm.seeded(draw=3):
                y = self.region(x)

        One process draws the same where its `SeededRandom` is told of the call: `with mode.region(): y = region(x)`.
        draws: the layouts of those inside, in order, as tuples.
        """
        layouts: dict[Label, Layout] = {(draw, k): Layout(*each) for k, each in enumerate(draws)}
        drawn = self._draws(own)
        mode = SeededRandom(drawn, layouts, (draw,), self.role.context.training)
        with mode, seeded_generators(drawn.seed, drawn.step, (draw,)):
            yield mode

    def own_code(
        self, module: nn.Module, draw: int, draws: Sequence[tuple[Any, ...]] = (), own: bool = False
    ) -> Callable[..., Any]:
        """A region: `module` of the user's own model, called as it is within `seeded`.

        Every microbatch begins with the buffers of the step's begin, and the last one's writes stay.
        """

        def call(*given: Any, **named: Any) -> Any:
            args, kwargs = unpacked(given), {name: unpacked(value) for name, value in named.items()}
            with with_copies(module, self.examples.copies(module)):
                if not any(last - first for first, last in self._draws(own).examples or ()):
                    return of_no_examples(module, args, kwargs)
                with self.seeded(draw, draws, own):
                    return module(*args, **kwargs)

        return call

    def _draws(self, own: bool = False) -> Draws:
        """Of the running microbatch; own: of this rank's own examples, not of its group's."""
        context, members = self.role.context, (self.role.transport.rank,) if own else self.role.members
        before, parts = context.first_example, (part for each in members for part in self.examples.intervals(each))
        return Draws(context.seed, context.number, [(before + a, before + b) for a, b in parts])
