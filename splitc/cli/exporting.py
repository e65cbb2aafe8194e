"""`splitc export`: the model of a checkpoint in one file, for programs that know nothing of splitc."""

from __future__ import annotations

import argparse
import warnings
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from splitc.cli.files import check_writable
from splitc.errors import LaunchError
from splitc.runtime.checkpoints.folders import Disks, found_in, newest
from splitc.runtime.checkpoints.piece import Piece
from splitc.runtime.checkpoints.storage import Saved
from splitc.runtime.files import StateFile
from splitc.runtime.progress import Step
from splitc.runtime.transport.simulated import run_ranks


def export(args: argparse.Namespace) -> int:
    """Write a checkpoint, the newest of a run's folder, for torch.load or as safetensors, which shares no tensors."""
    if bool(args.torch) == bool(args.safetensors):
        raise LaunchError("give either --torch FILE or --safetensors FILE")
    check_writable("splitc export", file := args.torch or args.safetensors)
    if args.safetensors and find_spec("safetensors") is None:
        raise LaunchError('--safetensors needs a package that is not installed; run: pip install "splitc[safetensors]"')
    name, path = args.checkpoint.name.partition("step-"), args.checkpoint
    folder, at = (path.parent, int(name[2])) if name[2].isdecimal() and not name[0] else (path, None)
    (found,) = run_ranks(
        1, lambda alone: newest(there) if (there := found_in(Disks(alone, folder, [0], "", ""), at)) else None
    )
    if found is None:
        raise LaunchError(f"{path}: there is no checkpoint; give the folder of a run, or one of its step-N")
    for problem in found[1]:
        warnings.warn(f"{folder}: {problem}; {found[0].name} is taken instead", stacklevel=1)
    with Step(f"writing {file}", args.quiet), TemporaryDirectory(dir=file.absolute().parent) as aside:
        made, saved = Path(aside, "torch"), Saved(found[0])
        run = saved.unpacked("run")
        likes = {first: saved.like(f"model.{first}") for first in run["keys"].values()}  # None of what has no elements
        own = {key: (first, like) for key, first in run["keys"].items() if (like := likes[first]) is not None}
        room = StateFile(made, {k: like if args.torch else torch.empty_like(like) for k, (_, like) in own.items()})
        for key, (first, _) in own.items():
            saved.read({f"model.{first}": Piece(room[key])})
        if args.safetensors:
            from safetensors.torch import save_file

            state = torch.load(made, weights_only=True, mmap=True)
            save_file(state, made := Path(aside, "safetensors"), {"format": "pt", "step": str(run["steps"])})
        made.replace(file)
    print(f"wrote {file}: the model after {run['steps']} steps")
    return 0
