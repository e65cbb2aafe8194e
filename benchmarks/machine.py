"""The machine on which something was measured, in words."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import torch


def machine() -> str:
    """Processors, torch and backend."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    return f"{os.cpu_count()} processors {processor}, torch {torch.__version__}, gloo"
