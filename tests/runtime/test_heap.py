"""A process that keeps what it frees gets its memory again without the kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from splitc.runtime.heap import keep_memory, kept_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(12 << 20) for _ in range(3)]  # 48 MB each: always mapped anew by default
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

"""


def run(script: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", SCRIPT + script], capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]


@pytest.fixture(autouse=True)
def _glibc() -> None:
    from splitc.runtime.heap import kept_memory

    with kept_memory() as kept:
        if not kept:
            pytest.skip("the C library is not glibc")


@pytest.mark.slow
def test_memory_that_is_kept_causes_no_page_faults_after_a_few_rounds() -> None:
    first, *_, last = run("assert keep_memory(); print(*(faults() for _ in range(8)))")
    assert first > 10_000
    assert last < first / 20


@pytest.mark.slow
def test_memory_that_was_kept_for_a_while_is_given_back() -> None:
    within, after, held = run(
        """
with kept_memory():
    within = [faults() for _ in range(8)][-1]
after = faults()
with open("/proc/self/statm") as file:
    held = int(file.read().split()[1]) * 4096
print(within, after, held)
"""
    )
    assert within < 2000 < after
    assert held < 600e6
