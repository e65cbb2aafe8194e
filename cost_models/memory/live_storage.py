"""Track the live bytes of tensors, real or fake, while code runs.

A TorchDispatchMode sees the results of every operation.  Each storage counts once, however many views it has, until it
is freed.  Saved-tensor hooks tell what autograd keeps for backward, in the thread that entered the mode.  Temporary
workspace inside a kernel is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HELD, SAVED, TRAVELS, WORKING = "held", "saved", "travels", "working"
"""The kind of a storage, the first that applies: held for the whole step; saved by autograd at present; a buffer of a
message or collective that autograd never saved; anything else."""


@dataclass
class _Storage:
    """A live storage: how often autograd saves it at present, and its marks."""

    nbytes: int
    alive: Any
    saved: int = 0
    was_saved: bool = False
    marks: set[str] = field(default_factory=set)

    @property
    def kind(self) -> str:
        if HELD in self.marks:
            return HELD
        if self.saved:
            return SAVED
        return TRAVELS if TRAVELS in self.marks and not self.was_saved else WORKING

    def save(self, times: int) -> None:
        """Count `times` further saves by autograd; -1 for a release."""
        self.saved += times
        self.was_saved = True


class LiveStorage(TorchDispatchMode):
    """Track live storages while this mode is entered.

    now: present bytes of each kind.  most: peak bytes of each kind.  peak: peak bytes of all kinds together.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = dict.fromkeys((HELD, SAVED, TRAVELS, WORKING), 0)
        self.most = dict(self.now)
        self.peak = 0
        self._storages: dict[int, _Storage] = {}
        self._hooks: Any = None

    @property
    def total(self) -> int:
        """Present bytes of all kinds."""
        return sum(self.now.values())

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count `tensors` as HELD or TRAVELS until they are freed."""
        for tensor in tensors:
            storage = self._seen(tensor)
            self._change(storage, partial(storage.marks.add, kind))

    def __enter__(self) -> LiveStorage:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and not value.is_sparse:  # whose parts are seen
                self._seen(value)
        return result

    # -- inside --------------------------------------------------------------------------------------------------------

    def _seen(self, tensor: Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = _Storage(storage.nbytes(), weakref.ref(storage, lambda _: self._gone(key)))
            self._count(WORKING, storage.nbytes())
        return self._storages[key]

    def _gone(self, key: int) -> None:
        storage = self._storages.pop(key)
        self._count(storage.kind, -storage.nbytes)

    def _save(self, tensor: Tensor) -> _Saved:
        storage = self._seen(tensor)
        self._change(storage, lambda: storage.save(1))
        return _Saved(tensor, lambda: self._change(storage, lambda: storage.save(-1)))

    def _change(self, storage: _Storage, change: Callable[[], None]) -> None:
        self.now[storage.kind] -= storage.nbytes
        change()
        self._count(storage.kind, storage.nbytes)

    def _count(self, kind: str, nbytes: int) -> None:
        self.now[kind] += nbytes
        self.most[kind] = max(self.most[kind], self.now[kind])
        self.peak = max(self.peak, self.total)


class _Saved:
    """A tensor saved by autograd; calls `release` when autograd drops it."""

    def __init__(self, tensor: Tensor, release: Callable[[], None]) -> None:
        self.tensor, self._release = tensor, release

    def __del__(self) -> None:
        self._release()
