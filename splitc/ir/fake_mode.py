"""Fake tensors also for operations whose results have fixed shapes that torch calls dynamic, such as the CTC loss."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

_SELDOM = 20_000  # objects that are made before garbage is looked for

KERNELS = threading.RLock()
"""Which kernels torch takes is of the process: who changes that, and who compares results bit by bit, has it."""


aten = torch.ops.aten
AT_ONCE = {each.default for each in (aten.addmm, aten._log_softmax, aten.nll_loss_forward, aten.threshold_backward)}
"""Operations that run on tensors without data as they are; torch would divide them into several fake ones."""


class FakeMode(FakeTensorMode):
    """A FakeTensorMode that runs an operation it has no shapes for on zeros and ones, to see its shapes.

    The first result must have the same shape for all data; the others, which only its backward reads, the largest.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def cpp_meta_supports_symint(self, func: Any) -> bool:
        return func in AT_ONCE or super().cpp_meta_supports_symint(func)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().dispatch(func, types, args, kwargs or {})
        except DynamicOutputShapeException:
            results = [_result(func, args, kwargs or {}, number) for number in ((0,), (0, 1), (1,))]
            first = [result[0] if isinstance(result, (tuple, list)) else result for result in results]
            if not all(isinstance(each, torch.Tensor) and each.shape == first[0].shape for each in first):
                raise
        except ZeroDivisionError:  # torch's rules divide by the number of examples: there are none, also in the result
            results = [each for each in args if isinstance(each, torch.Tensor) and not each.numel()]
            if not results:
                raise
        with self:
            return pytree.tree_map_only(torch.Tensor, torch.empty_like, results[-1])


@contextmanager
def few_objects() -> Iterator[None]:
    """Let garbage collection walk only what is made meanwhile, not all of torch and its compiler, and less often.

    Where it is rare already, it is left as it is.
    """
    often = gc.get_threshold()
    is_ours = gc.isenabled() and often[0] < _SELDOM and not gc.get_freeze_count()  # which counts them one by one
    try:
        if is_ours:
            gc.disable()
            FakeMode()  # the first one imports the compiler
            gc.freeze()
            gc.set_threshold(_SELDOM, *often[1:])
            gc.enable()
        yield
    finally:
        if is_ours:
            gc.set_threshold(*often)
            gc.enable()
            gc.unfreeze()


def _result(func: Any, args: Any, kwargs: Any, numbers: tuple[int, ...]) -> Any:
    """What an operation returns for real tensors that hold these numbers in turn; None where it fails."""

    def real(fake: FakeTensor) -> torch.Tensor:
        turns = torch.tensor(numbers, dtype=fake.dtype).repeat(fake.numel() // len(numbers) + 1)
        return turns[: fake.numel()].reshape(fake.shape)

    try:
        return func(*pytree.tree_map_only(FakeTensor, real, args), **pytree.tree_map_only(FakeTensor, real, kwargs))
    except Exception:  # these numbers are none that it takes
        return None
