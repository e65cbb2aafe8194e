"""Mixed precision: the dtype that a program is asked for, that a plan was made under, and that forwards run in."""

from __future__ import annotations

import torch
from torch import nn

from splitc.errors import LaunchError
from splitc.ir.plan import Plan


def under_autocast(root: nn.Module, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast to `dtype` on the device of a model, or none, whatever is on around it.

    For the forward only: autograd runs each backward in the dtype that its forward had.
    """
    device = next((tensor.device.type for tensor in (*root.parameters(), *root.buffers())), "cpu")
    if not torch.amp.is_autocast_available(device):
        device = "cpu"
    return torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None)


def require_autocast(dtype: torch.dtype | None) -> None:
    """Raise LaunchError for a dtype that no forward runs in."""
    if dtype not in (None, *_DTYPES):
        raise LaunchError(f"autocast={dtype!r}: give torch.bfloat16 or torch.float16, or leave it out")


_DTYPES = (torch.bfloat16, torch.float16)


def autocast_for(asked: torch.dtype | None, plan: Plan | None) -> torch.dtype | None:
    """The autocast of a plan, or the one asked for without a plan.  Raises LaunchError when the two differ."""
    if plan is None or not plan.model:
        return asked
    made = next((dtype for dtype in _DTYPES if plan.model.endswith(f"-{str(dtype).removeprefix('torch.')}")), None)
    if asked not in (None, made):
        raise LaunchError(f"the plan was made without autocast={asked}; leave that out, or compile without the plan")
    return made
