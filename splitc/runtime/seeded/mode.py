"""Seed the random numbers of eager code: a torch mode under which dropout and random functions draw by example.

    with SeededRandom(Draws(seed, step, examples), layouts):
        loss = loss_function(model(x), target)         # draws what the generated programs draw

Checkpointed functions (torch.utils.checkpoint) run plainly inside, since backward would run them again outside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ..generators import seeded_generators
from .draws import Draws, Label, Layout
from .table import Unseeded, form_of

_running = threading.local()


def running() -> SeededRandom | None:
    """The innermost SeededRandom that this thread runs in."""
    stack: list[SeededRandom] = getattr(_running, "stack", [])
    return stack[-1] if stack else None


class SeededRandom(TorchFunctionMode):
    """Draws the random numbers of eager code as functions of seed, step, call and example.

    draws: of this step.  Entering begins to count the calls, from `label` followed by 0.
    layouts: label of a draw -> where its examples lie; others have them as one of their shape in the same region has,
    or in dim 0, if it has their number.
    dropout: False makes dropout the identity.
    `unseeded` collects the names of random functions that no example defines, and that draw from torch's generator.
    """

    def __init__(
        self, draws: Draws, layouts: Mapping[Label, Layout] | None = None, label: Label = (), dropout: bool = True
    ) -> None:
        super().__init__()
        self.draws, self.unseeded = draws, set[str]()
        self._layouts, self._dropout = layouts or {}, dropout
        self._label, self._ordinal = label, 0

    def __enter__(self) -> SeededRandom:
        _make_checkpoints_plain()
        if running() is not self:  # else it handles a call, and is entered again for the calls inside
            self._ordinal = 0
        _running.stack = [*getattr(_running, "stack", []), self]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _running.stack = _running.stack[:-1]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            if (form := form_of(func, args, kwargs)) is not None:
                return form(self, *args, **kwargs)
        except Unseeded as error:
            self.unseeded.add(str(error))
        return func(*args, **kwargs)

    @contextmanager
    def region(self, draw: int | None = None) -> Iterator[None]:
        """Around the call of a module that is one node of the graph: one draw outside, with its own count inside.

        draw: its ordinal; None: the next one.
        """
        inside = self._next() if draw is None else (draw,)
        outer, self._label, self._ordinal = (self._label, self._ordinal), inside, 0
        try:
            with seeded_generators(self.draws.seed, self.draws.step, inside):
                yield
        finally:
            self._label, self._ordinal = outer

    def mask(self, value: Tensor, p: float, feature_dims: int, label: Label, layout: Layout | None = None) -> Tensor:
        """`value` after dropout."""
        if not self._dropout:
            return value
        layout = layout or self._layout(value, label, merged=True)
        return self.draws.dropout(value, p, label, layout, feature_dims)

    def numbers(self, kind: str, like: Tensor, label: Label, layout: Layout | None = None) -> Tensor:
        """Uniform or normal numbers, after `kind`."""
        layout = layout or self._layout(like, label, merged=False)
        found: Tensor = getattr(self.draws, kind)(like.detach(), label, layout)
        return found

    def _layout(self, value: Tensor, label: Label, merged: bool) -> Layout:
        count = None if self.draws.examples is None else sum(last - first for first, last in self.draws.examples)
        near = sorted((key for key in self._layouts if key == label or key[:-1] == label[:-1] != ()), key=label.__ne__)
        known = (self._layouts[key] for key in near if self._layouts[key].fits(value.shape, count))
        return next(known, None) or self._guess(value, merged, count)

    def _guess(self, value: Tensor, merged: bool, count: int | None) -> Layout:
        """Examples in dim 0, if it has their number.  merged: or a multiple of that."""
        if count is None and self._label and value.dim():
            return Layout(0)  # in a region: the same for all rows, and so for all examples
        rows, rest = divmod(value.shape[0], count) if count and value.dim() else (0, 1)
        return Layout(0, rows) if rows and not rest and (merged or rows == 1) else Layout(None)

    # -- the draws of the calls inside, as a `Draw` -------------------------------------------------------------------

    def _next(self) -> Label:
        """The label of the next draw."""
        self._ordinal += 1
        return (*self._label, self._ordinal - 1)

    def dropout(self, value: Tensor, p: float, feature_dims: int) -> Tensor:
        return self.mask(value, p, feature_dims, self._next())

    def uniform(self, like: Tensor) -> Tensor:
        return self.numbers("uniform", like, self._next())

    def normal(self, like: Tensor) -> Tensor:
        return self.numbers("normal", like, self._next())

    def write(self, old: Tensor, new: Tensor) -> Tensor:
        return old.copy_(new)

    def inside(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self:
            return function(*args, **kwargs)


_LOCK = threading.Lock()


def _make_checkpoints_plain() -> None:
    """Let checkpointed functions run plainly on threads inside a SeededRandom; elsewhere they stay as they are."""
    with _LOCK:
        generator = checkpoint._checkpoint_without_reentrant_generator
        if getattr(generator, "seeded", False):
            return

        def plain_generator(*args: Any, **kwargs: Any) -> Any:
            return generator(*args, **kwargs) if running() is None else iter((None,))

        def plain_apply(function: Any, preserve: Any, *args: Any) -> Any:
            kind: Any = checkpoint.CheckpointFunction
            return super(kind, kind).apply(function, preserve, *args) if running() is None else function(*args)

        plain_generator.seeded = True  # type: ignore[attr-defined]
        checkpoint._checkpoint_without_reentrant_generator = plain_generator
        checkpoint.CheckpointFunction.apply = plain_apply  # type: ignore[method-assign]
