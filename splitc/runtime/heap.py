"""Keep freed memory for the next tensors instead of giving it back to the kernel.

glibc hands large blocks back as soon as they are free, and the kernel fills every page of the next ones with zeros
first: a step on a CPU then spends a tenth to a third of its time there, and not the same in every step.  A process that
trains needs the same memory again in the next step, so it keeps it.
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


def keep_memory() -> bool:
    """Keep what this process frees from now on; False where the C library is not glibc, and nothing changes."""
    return _set(((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _GROWTH)))


@contextlib.contextmanager
def kept_memory() -> Iterator[bool]:
    """Keep freed memory as a rank does, and give it back in the end; gives what `keep_memory` returns."""
    kept = keep_memory()
    try:
        yield kept
    finally:
        if kept:
            _set(_DEFAULTS)
            ctypes.CDLL(None).malloc_trim(0)


def _set(options: tuple[tuple[int, int], ...]) -> bool:
    if not sys.platform.startswith("linux") or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return False
    return 0 not in [libc.mallopt(name, value) for name, value in options]
