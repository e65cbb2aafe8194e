"""Make packages import whose binary part has no build for this torch: their operators are declared, not implemented.

torchvision registers the shapes of its operators at import and fails where they are not declared; torchaudio's library
is linked against CUDA.  The models of the table use neither.
"""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType
from typing import Any

import torch

_LIBRARIES: list[torch.library.Library] = []  # a library that is collected takes its operators with it


def declare() -> None:
    """Declare the operators, once a process, where the package has no library that loads."""
    if not _LIBRARIES and "+" not in importlib.metadata.version("torchvision"):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
    if not torch.cuda.is_available() and "torchaudio._extension" not in sys.modules:
        extension: Any = ModuleType("torchaudio._extension")
        extension._IS_TORCHAUDIO_EXT_AVAILABLE = extension._IS_ALIGN_AVAILABLE = False
        extension.fail_if_no_align = lambda function: function
        sys.modules["torchaudio._extension"] = extension
