"""The options of a generated `launch.py`, which `splitc run` takes too.  Quick to load: no torch."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
from pathlib import Path

from ..errors import MEMORY, SHM, LaunchError

EVERY = 100  # steps between checkpoints, unless given


def copies_every(within: int, cycle: int) -> tuple[int, bool]:
    """The steps from one copy in memory to the next, so that `within` steps are lost at most, and whether it has these.

    Else training waits for it.  cycle: the steps of an update, or of a round, within which nothing can be copied.
    Raises LaunchError where they are more.
    """
    if cycle > within:
        raise LaunchError(
            f"--neighbour-copy {within}: nothing can be copied within the {cycle} steps of an update, or of a round; "
            f"give at least {cycle}"
        )
    every = max(1, within // (2 * cycle)) * cycle
    return every, 2 * every <= within


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text) if re.fullmatch(r"[0-9]{1,18}", text) else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what a training run needs."""
    add = parser.add_argument
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=positive, metavar="N", help="training steps in all (default 10)")
    length.add_argument("--epochs", type=positive, metavar="N", help="in place of --steps: passes over a Dataset")
    data = "of the worker: gives a Dataset, or this rank's batches; synthetic batches without it"
    add("--data", metavar="MODULE:FUNCTION", help=data)
    add("--eval-data", metavar="MODULE:FUNCTION", help="of the worker: gives a Dataset to evaluate on")
    add("--eval-every", type=positive, metavar="N", help="evaluate every N steps; the last is evaluated in any case")
    add("--accuracy", action="store_true", help="evaluate also which part of the classes is predicted right")
    own = "of the parameters: makes the optimizer, in place of that in launch.py"
    add("--optimizer", metavar="MODULE:FUNCTION", help=own)
    add("--lr", type=float, metavar="RATE", help="of all its groups; a checkpoint that is resumed keeps its own")
    add("--log-every", type=positive, metavar="N", help="print each N-th step (default: the first 100, then few)")
    add("--seed", type=int, default=0, metavar="N", help="of dropout, order and synthetic data (default 0)")
    add("--compile-stages", action="store_true", help="run stages under torch.compile, where that is faster")
    add("--backend", choices=("gloo", "nccl"), help="default: nccl with a GPU for each rank")
    add("--device", choices=("cpu", "cuda"), help="default: the GPUs, where torch sees any")
    add("--save", type=Path, metavar="FILE", help="write the trained model's state_dict there")
    add("--save-every", type=positive, metavar="N", help="write a checkpoint every N steps, and after the last")
    there = f"default: checkpoints; without --save-every each {EVERY} steps"
    add("--checkpoints", type=Path, metavar="FOLDER", help=there)
    copied = "a lost rank or host costs K steps at most: a checkpoint every K/2 in memory of each host and of the next"
    add("--neighbour-copy", type=positive, metavar="K", help=copied)
    finite = "what a loss or gradient that is not finite does: end the run, or leave its update out"
    add("--check-finite", choices=("stop", "skip"), help=finite)
    add("--check-replicas", type=positive, metavar="N", help="compare what several ranks hold every N steps")
    add("--resume", action="store_true", help="go on from the last checkpoint there, if there is one")
    add("--tensorboard", type=Path, metavar="FOLDER", help="write losses there, where TensorBoard is installed")


def use_checkpoints(args: argparse.Namespace, restarts: int) -> None:
    """Complete the options of checkpoints; restarts: how often a run that fails is started again.

    saves: whether there are any.
    """
    args.saves = bool(args.save_every or args.checkpoints or restarts or args.neighbour_copy)
    args.checkpoints = args.checkpoints or Path("checkpoints")
    args.resume = args.resume or restarts > 0


def check_options(args: argparse.Namespace) -> None:
    """Raise LaunchError for options that are known to fail."""
    if args.save is not None and not args.save.absolute().parent.is_dir():
        raise LaunchError(f"--save {args.save}: there is no folder {args.save.absolute().parent}")
    for option, given in (("--eval-every", args.eval_every), ("--accuracy", args.accuracy)):
        if given and args.eval_data is None:
            raise LaunchError(f"{option} needs --eval-data MODULE:FUNCTION, what to evaluate on")
    if args.lr is not None and not 0 <= args.lr < math.inf:
        raise LaunchError(f"--lr {args.lr}: give a learning rate of at least 0")
    if args.epochs is not None and args.data is None:
        raise LaunchError("--epochs needs --data MODULE:FUNCTION that gives a Dataset; synthetic batches have no end")
    memory = os.environ.get(MEMORY, SHM)
    if args.neighbour_copy and not getattr(args, "hosts", None) and not os.access(memory, os.W_OK):
        raise LaunchError(f"--neighbour-copy: no folder {memory} to write to; name another one in memory by {MEMORY}")
    there = sorted(path.name for path in args.checkpoints.glob("step-*[0-9]")) if args.saves else []
    if there and not args.resume:
        raise LaunchError(
            f"{args.checkpoints} holds {there[-1]} of an earlier run; go on from it with --resume, or give another "
            f"folder with --checkpoints"
        )
    if args.tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
        raise LaunchError("--tensorboard needs TensorBoard, which is not installed: python -m pip install tensorboard")
