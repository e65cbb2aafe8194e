"""`splitc demo`: compile a small model for 4 ranks, train it three ways on real digits, and compare.

Exit codes: 0 done; 1 a training failed, or they differ by more than rounding; 2 the demo cannot start.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor
from torch.utils.data import TensorDataset

import splitc
from splitc import units
from splitc.cli.examples.demo import model as digits
from splitc.cli.examples.demo.train import Training, train_alone
from splitc.cost_models.calibration.calibrate import cores
from splitc.errors import LaunchError, SplitcError
from splitc.runtime.launch.torchrun import torchrun

CLUSTER = "v100-100gbe"  # prices the plan; on a slower network a model so small is fastest on one GPU
ROUNDING = 1e-3  # the largest distance between two trainings that rounding explains

_BUILD, _DATA = "build", "digits.pt"
_OWN = (_BUILD, _DATA, "ddp.pt", "splitc.pt")  # what an earlier demo may have left
_WIDTH = 80


def demo(args: argparse.Namespace) -> int:
    """Run `splitc demo`, whose options are the demo's own."""
    return main(args.arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return _demo(args.output, args.epochs)
    except SplitcError as error:
        print(f"splitc demo: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="splitc demo",
        description="Train a small model on real digits in one process, under DDP and by splitc, and compare them.",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FOLDER",
        type=Path,
        default=Path("splitc-demo"),
        help="where scripts and results go (default: splitc-demo); an earlier demo there is replaced",
    )
    parser.add_argument("--epochs", type=_positive, default=2, metavar="N", help="epochs of 35 steps (default 2)")
    return parser


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _demo(folder: Path, epochs: int) -> int:
    begin = time.perf_counter()
    _say("splitc demo: a small VGG learns handwritten digits, trained in three ways.")
    train, held_out = digits.load_digits()
    prepare(folder)

    _title("1. Plan: which rank runs which layer")
    _compile(folder)

    steps = len(train) // digits.GLOBAL_BATCH
    _title(f"2. Train: {len(train)} digits, {epochs} x {steps} steps of {digits.GLOBAL_BATCH} images")
    torch.save(train.tensors, folder / _DATA)
    _say(f"one process, {digits.GLOBAL_BATCH} images a step")
    trainings = {"one process": train_alone(train, epochs)}
    share, of_conv = digits.GLOBAL_BATCH // digits.WORLD, digits.GLOBAL_BATCH // digits.CONV_RANKS
    for name, ranks in (
        ("DDP", f"{digits.WORLD} processes x {share} images; they take some seconds to start"),
        ("splitc", f"{digits.CONV_RANKS} conv processes x {of_conv} images, 1 fc process; started by torchrun too"),
    ):
        _say(f"{name}, {ranks}")
        training = train_on_ranks(name.lower(), folder, epochs)
        if training is None:
            print(f"splitc demo: the {name} training failed; its own error stands first above", file=sys.stderr)
            return 1
        trainings[name] = training

    _title("3. Compare")
    print(comparison(trainings, held_out))
    print(f"\n{traffic(trainings)}\n")
    _say(meaning(trainings))
    _title("Next")
    print(next_commands(folder))
    _say(f"\nDone in {time.perf_counter() - begin:.0f} s.")
    return 0 if max(distances(trainings).values()) < ROUNDING else 1


def prepare(folder: Path) -> None:
    """Make `folder`, and remove the results of an earlier demo.  Raises LaunchError when it holds anything else."""
    if folder.exists() and not folder.is_dir():
        raise LaunchError(f"{folder} is a file; name a folder: --output FOLDER")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"cannot write to {folder} ({error.strerror}); name another folder: --output FOLDER"
        ) from error
    if foreign := sorted(path.name for path in folder.iterdir() if path.name not in _OWN):
        raise LaunchError(
            f"{folder} holds more than an earlier demo ({', '.join(foreign[:5])}); name another folder: --output FOLDER"
        )
    for name in _OWN[1:]:
        (folder / name).unlink(missing_ok=True)


def _compile(folder: Path) -> None:
    """Compile the model, print its report and save the scripts."""
    model = digits.model()
    program = splitc.compile(
        model,
        world=digits.WORLD,
        example=digits.example(),
        target=digits.target(),
        loss=digits.loss,
        strategy=f"layer_separation(n_c={digits.CONV_RANKS},n_f={digits.WORLD - digits.CONV_RANKS})",
        cluster=CLUSTER,
    )
    assert isinstance(program, splitc.CompiledProgram)
    build = program.save(folder / _BUILD)
    print(program.report())
    _say(
        f"The head, three linear layers, holds {_percent(digits.head_share(model), 1)} of the parameters. So one rank "
        f"keeps it for all, and its gradients never travel. The seconds above are predictions for {CLUSTER}; what "
        f"follows runs on this machine."
    )
    scripts = [*(f"{role}.py" for role in program.plan.roles), f"rank0.py .. rank{digits.WORLD - 1}.py", "launch.py"]
    _say(f"\nWrote {build}/: {', '.join(scripts)}")


def train_on_ranks(way: str, folder: Path, epochs: int) -> Training | None:
    """Train in `WORLD` processes; None when they failed, after printing their error."""
    arguments = [way, str(folder), "--epochs", str(epochs)]
    if torchrun(["-m", "splitc.cli.examples.demo.train", *arguments], digits.WORLD).returncode:
        return None
    return Training.load(folder / f"{way}.pt")


def comparison(trainings: Mapping[str, Training], held_out: TensorDataset) -> str:
    """Table: accuracy and last loss of each training, and its distance from one process."""
    distance = {"one process": "", **{name: f"{value:.1e}" for name, value in distances(trainings).items()}}
    rows = [
        [
            name,
            _percent(accuracy(training.state, held_out), 2),
            f"{training.losses[-1]:.6f}",
            distance[name],
            units.seconds(training.seconds),
        ]
        for name, training in trainings.items()
    ]
    headers = ["", f"of {len(held_out)} held out", "last loss", "distance", "a step takes"]
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 4))


def traffic(trainings: Mapping[str, Training]) -> str:
    """Table: the bytes that each rank sends in a step."""
    ranks = range(digits.WORLD)
    sent = {name: trainings[name].sent_bytes for name in ("DDP", "splitc")}
    rows = [[name, *map(units.nbytes, [*by_rank, sum(by_rank)])] for name, by_rank in sent.items()]
    headers = ["sent in a step", *(f"rank {rank}" for rank in ranks), "all"]
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * (digits.WORLD + 1)))


def meaning(trainings: Mapping[str, Training]) -> str:
    """Explain the two tables."""
    ddp, separated = (max(trainings[name].sent_bytes) for name in ("DDP", "splitc"))
    far = max(distances(trainings).values())
    same = (
        "All three are the same training: they differ by the rounding of float32 only."
        if far < ROUNDING
        else "THE TRAININGS DIFFER BY MORE THAN ROUNDING: please report this as a bug of splitc."
    )
    network = 0.125e9
    return (
        f"Distance: of the final parameters from those of one process, relative L2. Bytes: of splitc measured, its "
        f"all-reduce counted as on a ring; of DDP 2 (n - 1) / n of the gradients, what a ring sends.\n\n"
        f"{same} DDP sends the gradients of the head from every rank; splitc sends activations to the rank that holds "
        f"it, and the busiest rank sends {ddp / separated:.0f} times fewer bytes.\n\n"
        f"The seconds say little: here all ranks share {cores()} cores, and no network is between them. On 1 Gbit/s "
        f"the bytes alone would take {units.seconds(ddp / network)} of each DDP step, and "
        f"{units.seconds(separated / network)} of each step of splitc."
    )


def next_commands(folder: Path) -> str:
    """The commands to try next, relative to the current folder."""
    command, build = _command(), folder / _BUILD
    return "\n".join(
        [
            "# read what the ranks run; it is yours to edit",
            f"less {build}/conv.py {build}/fc.py",
            "# train ten steps with it",
            f"{command} run {build} --data splitc.cli.examples.demo.model:batches",
            "# see how a slower network changes the prices",
            f"{command} inspect splitc.cli.examples.demo.model:model --world 4 --cluster v100-10gbe",
            "# compare every gradient with one process's",
            f"{command} verify splitc.cli.examples.demo.model:model --world 4 --cluster {CLUSTER}",
        ]
    )


def distances(trainings: Mapping[str, Training]) -> dict[str, float]:
    """The relative L2 distance of the final parameters from those of one process: ||a - b|| / ||b||."""
    one = _flat(trainings["one process"].state)
    return {
        name: float((_flat(training.state) - one).norm() / one.norm())
        for name, training in trainings.items()
        if name != "one process"
    }


def _flat(state: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([state[name].double().flatten() for name in sorted(state)])


def accuracy(state: Mapping[str, Tensor], held_out: TensorDataset) -> float:
    """The accuracy of a model with these parameters on the held-out images."""
    images, classes = held_out.tensors
    model = digits.Digits()
    model.load_state_dict(dict(state))
    with torch.no_grad():
        return float((model(images).argmax(1) == classes).double().mean())


def _percent(part: float, digits_after: int) -> str:
    return f"{100 * part:.{digits_after}f} %"


def _command() -> str:
    """How to call splitc from here: its environment may not be activated."""
    beside = Path(sys.executable).parent / "splitc"
    if shutil.which("splitc"):
        return "splitc"
    return os.path.relpath(beside) if beside.exists() else "python -m splitc.cli"


def _title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def _say(text: str) -> None:
    print("\n".join(textwrap.fill(line, _WIDTH) for line in text.split("\n")), flush=True)


if __name__ == "__main__":
    sys.exit(main())
