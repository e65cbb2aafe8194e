"""Keep freed memory in the process instead of returning it to the kernel.

glibc returns large blocks as soon as they are freed, and the kernel zeroes every page of the next ones: 10 to 33 % of a
step on a CPU, varying from step to step.  A training process needs the same memory in every step, so it keeps it.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # names in malloc.h: M_TRIM_THRESHOLD, ...
_NEVER = -1  # bytes at the end of the heap above which they are given back
_GROWTH = 64 << 20  # bytes by which the heap grows
_DEFAULTS = ((_MMAP_MAX, 65536), (_TRIM_THRESHOLD, 128 << 10), (_TOP_PAD, 128 << 10))
_keeps = False  # whether this process does


def keep_memory() -> bool:
    """Stop returning freed memory.  Returns False, without effect, where the C library is not glibc."""
    global _keeps
    _keeps = _set(((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _GROWTH)))
    return _keeps


@contextlib.contextmanager
def kept_memory() -> Iterator[bool]:
    """Keep freed memory inside; at the end go on as before, so a rank goes on.  Yields the result of `keep_memory`."""
    global _keeps
    before, kept = _keeps, keep_memory()
    try:
        yield kept
    finally:
        if kept and not before:
            _keeps = False
            _set(_DEFAULTS)
            ctypes.CDLL(None).malloc_trim(0)


def _set(options: tuple[tuple[int, int], ...]) -> bool:
    if not sys.platform.startswith("linux") or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return False
    return 0 not in [libc.mallopt(name, value) for name, value in options]
