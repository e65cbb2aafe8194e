"""The Triton kernel of dropout: under Triton's interpreter it is compared with torch, and it compiles for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

import pytest

from tests import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which comes with torch for CUDA"),
]


def test_the_kernel_has_the_bits_of_torch_and_costs_what_it_declares() -> None:
    command = [sys.executable, "-m", "tests.support.interpreted"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("capability", [70, 80, 90])
def test_the_kernel_compiles_for_gpus(capability: int) -> None:
    fused: Any = resolve_name("splitc.runtime.seeded.fused")
    source, target = (resolve_name(f"triton.{name}") for name in ("compiler:ASTSource", "backends.compiler:GPUTarget"))
    names = fused._kernel.arg_names
    for dtype, last, shard in (
        ("fp32", False, False),
        ("bf16", False, True),
        ("fp16", True, False),
        ("fp64", False, True),
    ):
        works = fused.tl.float64 if dtype == "fp64" else fused.tl.float32
        constants = {"ROWS": 4, "COLUMNS": 256, "LAST": last, "SHARD": shard, "WORKS": works}
        types = {"value": f"*{dtype}", "out": f"*{dtype}", "mask": "*u8", "examples": "*i32", "scale": "i64"}
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        given = {(names.index(name),): value for name, value in constants.items()}
        made = resolve_name("triton:compile")(source(fused._kernel, signature, given), target("cuda", capability, 32))
        assert "st.global" in made.asm["ptx"]
        if dtype == "bf16" and capability >= 90:
            assert "cvt.rn.bf16" in made.asm["ptx"]  # to the nearest, the even one of two
