"""What a generated `launch.py` calls: options, this rank's worker, its batches, and the measuring of steps."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from ..errors import COMMAND, STOPPED_BY, LaunchError
from ..journal import note
from ..live import Expected
from ..parameter_groups import OptimizerFactory
from ..progress import Step
from ..transport.base import Transport
from ..transport.distributed import init
from ..transport.phases import WARM_UP, report, write
from ..transport.recorder import Recorder
from ..transport.started import is_rank, number, was_restarted
from ..weights import first_names
from ..worker import Worker
from .failures import guarded
from .feed import STEPS, evaluated, evaluation, found
from .feed import Batches as batches
from .history import History
from .loader import load_rank, require_one_build
from .options import EVERY, add_options, check_options, use_checkpoints
from .shown import Losses as losses
from .shown import Shown as shown
from .stopping import Stopped

__all__ = ["batches", "evaluated", "evaluation", "guarded", "losses", "shown"]


def main(train: Callable[[argparse.Namespace], None], world: int) -> None:
    """Call `train` with the options of the command line; print its error and end this process when it fails."""
    parser = argparse.ArgumentParser(prog="launch.py", description=f"Train this build on {world} ranks of torchrun.")
    add_options(parser)
    phases = f"record every step's phases after {WARM_UP} of warm-up, and write them there as JSON; without --data one "
    parser.add_argument("--measure", metavar="FILE", type=Path, help=f"{phases}batch is used again and again")
    args = parser.parse_args()
    guarded(is_rank)
    guarded(lambda: use_checkpoints(args, number("TORCHELASTIC_MAX_RESTARTS") or was_restarted()))
    args.history = History(args.checkpoints, Path(sys.argv[0])) if args.saves else None
    guarded(lambda: train(args), args.history)


def load_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A build's tensors by name, read when they are used, and its model's keys with their `first_names`.

    Raises LaunchError when the folder has no weights.pt of a build.
    """
    path = folder / "weights.pt"
    if not path.exists():
        raise LaunchError(f"{path.name} is missing beside launch.py; compile the model again")
    saved = torch.load(path, weights_only=True, mmap=True)
    if not {"state", "extra"} <= saved.keys():
        raise LaunchError(f"{path.name} is not what splitc wrote; compile the model again")
    return {**saved["state"], **saved["extra"]}, first_names(saved["state"])


@contextmanager
def open_worker(
    script: str, world: int, optimizer: OptimizerFactory, args: argparse.Namespace, **options: Any
) -> Iterator[Worker]:
    """This process's worker of the build that `script` lies in; on leaving, its measurements are written.

    options: further arguments of the `Worker`, clip_norm=1.0 say.
    Raises LaunchError when the options do not fit the build, or the ranks do not find each other.
    """
    folder = Path(script).resolve().parent
    _check_options(folder, args)
    transport = init(world, args.backend, args.device, tell=True)
    require_one_build(folder, transport)
    finite = {None: False, "stop": True}.get(args.check_finite, args.check_finite)
    checks = {"check_finite": finite, "check_replicas": args.check_replicas}
    options = {"compile_stages": args.compile_stages, **checks, **options}
    on = transport if args.measure is None else Recorder(transport)
    worker = load_worker(folder, on, _asked(optimizer, args), args.seed, **options)
    if worker.live is not None and worker.rank.index == 0:
        worker.live.expected = _expected(folder, worker)
    args.save_every = args.save_every or (args.saves and -(-EVERY // worker.cycle[0]) * worker.cycle[0])
    try:
        yield worker
    except Stopped as signal:
        _stop(worker, args, signal)
    with Step("completing the checkpoint", quiet=not args.saves or worker.rank.index > 0):
        worker.close()
    if isinstance(worker, MeasuredWorker):
        all_steps = transport.gather_objects(worker.recorder.steps)
        if all_steps is not None:
            write(report(all_steps, worker.examples, {"device": str(transport.device)}), args.measure)
    transport.close()


def _asked(make: OptimizerFactory, args: argparse.Namespace) -> OptimizerFactory:
    """The factory that launch.py has, or that of `--optimizer`, with the rate of `--lr`."""

    def made(params: Any) -> torch.optim.Optimizer:
        optimizer = make(params) if args.optimizer is None else found(args.optimizer, params, "--optimizer")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise LaunchError(f"--optimizer {args.optimizer} gives a {type(optimizer).__name__}, not an optimizer")
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] if args.lr is None else args.lr
        return optimizer

    return made


def _stop(worker: Worker, args: argparse.Namespace, signal: Stopped) -> None:
    """Save what all ranks have made, and print how it goes on."""
    rest = "nothing was saved, which --checkpoints FOLDER does"
    if args.saves:
        worker.save(args.checkpoints)
        command = os.environ.get(COMMAND, "the same command with")
        rest = f"goes on: {command}{' --resume' * ('--resume' not in command.split())}"
    if worker.rank.index == 0:
        print(f"{STOPPED_BY}{signal} after step {worker.steps}; {rest}", file=sys.stderr, flush=True)


def _expected(folder: Path, worker: Worker) -> Expected:
    """What the plan of a build says of its steps, as far as it can be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        told = plan["predicted"]
        look = f"splitc calibrate -o now.toml, then splitc inspect MODEL --world {plan['world']} --cluster now.toml"
        return Expected(
            max((phases["step"] for phases in told), default=0.0),
            [phases["compute"] for phases in told],
            worker.cycle[0],
            lambda cause: f"whether another plan would be faster: {look}",
            lambda seconds: note(plan, seconds, folder.name),
        )
    return Expected()


class MeasuredWorker(Worker):
    """A worker on a `Recorder`, which records every step.  examples: of every step, over all readers."""

    def __init__(self, program: Any, recorder: Recorder, *arguments: Any, **options: Any) -> None:
        super().__init__(program, recorder, *arguments, **options)
        self.recorder, self.examples = recorder, list[int]()

    def step(self, *batch: Tensor) -> Tensor:
        with self.recorder.step():
            loss = super().step(*batch)
        self.examples.append(self.batch_offsets[-1])
        return loss


def load_worker(
    folder: Path, transport: Transport, optimizer: OptimizerFactory, seed: int = 0, **options: Any
) -> Worker:
    """This rank's worker of the build in `folder`; it is measured where `transport` is a Recorder."""
    weights, keys = load_weights(folder)
    program = load_rank(folder, transport.rank)
    made = MeasuredWorker if isinstance(transport, Recorder) else Worker
    return made(program, transport, weights, keys, optimizer, seed=seed, **options)  # type: ignore[arg-type]


def _check_options(folder: Path, args: argparse.Namespace) -> None:
    check_options(args)
    if args.save is not None and args.save.resolve() == folder / "weights.pt":
        raise LaunchError(f"--save {args.save}: name another file")
    if args.measure is not None and not args.measure.absolute().parent.is_dir():
        raise LaunchError(f"--measure {args.measure}: there is no folder {args.measure.absolute().parent}")
    if args.measure is not None and (args.steps or STEPS) <= WARM_UP:
        raise LaunchError(f"--measure leaves out the first {WARM_UP} steps; give --steps {WARM_UP + 1} or more")


def resume(worker: Worker, args: argparse.Namespace) -> None:
    """Go on from the last checkpoint in `--checkpoints`, if there is one, and print it."""
    there = any(worker.rank.transport.all_gather_objects(bool([*args.checkpoints.glob("step-*[0-9]")])))
    text = f"no checkpoint in {args.checkpoints}: training begins"
    if there:
        with warnings.catch_warnings(record=True) as said:
            text = f"goes on after step {worker.resume(args.checkpoints)}, from {worker.resumed_from}"
        text = "\n".join([*(f"warning: {each.message}" for each in said), text])
    if worker.rank.index == 0:
        print(text, flush=True)


def board(worker: Worker, args: argparse.Namespace) -> Any:
    """TensorBoard's writer on rank 0, into `--tensorboard`; None elsewhere, and without it."""
    if args.tensorboard is None or worker.rank.index > 0:
        return None
    writer = resolve_name("torch.utils.tensorboard:SummaryWriter")(args.tensorboard)
    atexit.register(writer.close)
    return writer
