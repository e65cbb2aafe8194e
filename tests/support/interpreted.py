"""Run the Triton kernel of dropout on the CPU: `TRITON_INTERPRET=1 python -m tests.support.interpreted`.

A process of its own, since Triton reads the variable when it is imported.
"""

from __future__ import annotations

from collections import Counter
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import torch

from splitc.runtime.seeded import kernels
from tests.runtime.seeded.test_kernels import DTYPES, LAYOUTS, run, strided


def compare(fused: Any) -> None:
    """The bits of the kernel are those of torch, whatever the layout and dtype."""
    for k, (name, (shape, *_)) in enumerate(LAYOUTS.items()):
        for n, dtype in enumerate(DTYPES):
            # the interpreter rounds to bfloat16 otherwise than torch and GPUs do, so there nothing is rounded
            p = (0.5, 0.75, 1.0)[k % 3] if dtype == torch.bfloat16 else (0.1, 1 / 3, 1.0)[(k + n) % 3]
            for how, value in strided(shape, dtype).items():
                with mock.patch.object(kernels, "_fused", lambda value: fused):
                    found = run(value, p, name)
                for one, other in zip(found, run(value, p, name), strict=True):
                    assert torch.equal(one, other) and one.stride() == other.stride(), (name, dtype, p, how)


class Counted:
    """A kernel that counts its launches, and the bytes that its loads and stores touch."""

    def __init__(self, kernel: Any, builder: Any) -> None:
        self.kernel, self.builder, self.launches, self.nbytes = kernel, builder, 0, Counter[str]()

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self.kernel[grid]

    def watched(self, name: str) -> Any:
        call = getattr(self.builder, name)

        def counting(pointers: Any, *args: Any) -> Any:
            inside = args[0 if name == "create_masked_load" else 1]
            element = pointers.get_element_ty()
            self.nbytes[str(element)] += int(inside.data.sum()) * element.primitive_bitwidth // 8
            return call(pointers, *args)

        return mock.patch.object(self.builder, name, counting)


def count(fused: Any) -> None:
    """What an operation declares is what its kernel launches, reads and writes."""
    builder = resolve_name("triton.runtime.interpreter:interpreter_builder")
    for shape, dims in (((8, 33), 2), ((3, 5000), 2), ((4, 6, 5, 3), 4), ((4, 6, 5, 3), 2)):
        for how in ("contiguous", "channels last"):
            if (value := strided(shape, torch.float32).get(how)) is None:
                continue
            counted = Counted(fused._kernel, builder)
            with (
                mock.patch.object(kernels, "_fused", lambda value: fused),
                mock.patch.object(fused, "_kernel", counted),
                counted.watched("create_masked_load"),
                counted.watched("create_masked_store"),
            ):
                numbers, examples = torch.tensor((3, 7, 0)), torch.arange(len(value), dtype=torch.int32)
                made = kernels._dropout(value, numbers, examples, 0.5, [0], [dims, 0, 1, 1], [])
            cost = kernels.KERNELS["splitc::dropout"](value=value, made=made)
            del counted.nbytes["int32"]  # the indices of examples, one for each row of a tile
            assert (counted.launches, counted.nbytes.total()) == (cost.launches, cost.nbytes), (shape, dims, how)


if __name__ == "__main__":
    module = resolve_name("splitc.runtime.seeded.fused")
    compare(module)
    count(module)
