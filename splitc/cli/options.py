"""Parse the commands and their options.  Quick to load: no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from splitc.cli import model_options as of
from splitc.cli.parser import UNITS as UNITS
from splitc.cli.parser import Add, Parser, seconds
from splitc.runtime.launch.options import positive as positive
from splitc.version import __version__

_MANUAL = Path(__file__).parent / "manual"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of one command.  Raises LaunchError for what is unknown, missing or malformed."""
    parser = whole_parser()
    if argv[:1] == ["demo"]:  # the demo has options of its own; argparse would take those that lead
        args = parser.parse_args(argv[:1])
        args.arguments = list(argv[1:])
        return args
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        own: Parser = args.parser
        wrong = unknown[0].partition("=")[0]
        if wrong.startswith("-"):
            own.refuse_option(wrong, "unknown option")
        own.error(f"{unknown[0]!r} is one argument too many")
    return args


def whole_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="splitc", description="Compile a PyTorch model into one program for each rank.", epilog=_epilog()
    )
    parser.add_argument("--version", action="version", version=f"splitc {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    parser.set_defaults(commands=commands.choices)
    for name, (add_options, function) in _COMMANDS.items():
        text = add_options.__doc__ or name
        brief = f"{text[0].lower()}{text[1:].removesuffix('.')}"
        command: Parser = commands.add_parser(
            name, help=brief, description=text, epilog=_epilog(name), add_help=name != "demo"
        )
        command.set_defaults(parser=command, function=function)
        add_options(command.add_argument)
    return parser


def _epilog(command: str = "splitc") -> str:
    """What follows the options in the help of a command: examples, conventions and exit codes."""
    takes_model = command in ("try", "inspect", "explain", "compile", "verify", "simulate")
    pages = [_MANUAL / f"{page}.txt" for page in (command, *["conventions"] * takes_model, "exit_codes")]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages if page.is_file())


def _diff(add: Add) -> None:
    """Show what differs between two plans; exit code 1 when they differ."""
    add("a", help="a plan.json, or a folder that `splitc compile` wrote")
    add("b", help="another one")
    add("--json", action="store_true", help="print the differences as JSON (schema 1)")


def _run(add: Add) -> None:
    """Train a build on this machine, under torchrun."""
    add("build", help="a folder that `splitc compile` wrote")
    add("arguments", nargs=argparse.REMAINDER, help="passed on to launch.py, for example --steps 3")


def _export(add: Add) -> None:
    """Write the model of a checkpoint into one file, for torch.load or as safetensors."""
    add("checkpoint", type=Path, help="the folder of a run's checkpoints, for the newest, or one of its step-N")
    add("--torch", type=Path, metavar="FILE", help="write a file for torch.load")
    add("--safetensors", type=Path, metavar="FILE", help='write safetensors; needs: pip install "splitc[safetensors]"')
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def _job(add: Add) -> None:
    """Write what Slurm or Kubernetes takes to train a build."""
    add("--sbatch", type=Path, metavar="FILE", help="write a script for Slurm's sbatch")
    add("--jobset", type=Path, metavar="FILE", help="write a JobSet for kubectl apply -f")
    add("--image", metavar="NAME", help="with --jobset: the container image, with torch, splitc and the build")
    add("--ranks-per-host", type=positive, default=0, metavar="N", help="default: those of the plan's cluster")
    add("--cpus", type=positive, default=1, metavar="N", help="cores of a rank (default 1)")
    add("--gpus", type=positive, default=0, metavar="N", help="GPUs of a rank (default: ranks compute on the CPU)")
    add("--restarts", type=positive, default=0, metavar="N", help="start again after a failure, N times at most")
    _run(add)


def _calibrate(add: Add) -> None:
    """Measure devices and links, and write them as a cluster file."""
    add("-o", "--output", metavar="FILE", default="cluster.toml", help="default: cluster.toml")
    add("--budget", type=seconds, default=90.0, metavar="SECONDS", help="how long to measure, about (default 90)")
    add("--ranks", type=positive, metavar="N", help="processes to start (default: the GPUs, else 2 to 16, as cores)")
    add("--separate", action="store_true", help="the ranks are machines of their own, and share no cores and no link")
    add("--backend", choices=("gloo", "nccl"), help="default: nccl with a GPU for each rank")
    add("--all", action="store_true", help="print every row that was measured beside its fit")
    add("--json", action="store_true", help="print the cluster and the residuals as JSON")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def _doctor(add: Add) -> None:
    """Measure all pairs of hosts before training, and say what is wrong; exit code 1 then."""
    add("--hosts", metavar="A,B:2", help="start a rank on each of these hosts over ssh; :2 are the ranks of one")
    add("--ranks", type=positive, metavar="N", help="processes to start on this machine (default 2)")
    add("--cluster", metavar="NAME", help="compare with this cluster: a known name or a .toml file")
    add("--budget", type=seconds, default=12.0, metavar="SECONDS", help="how long to measure, about (default 12)")
    add("--json", action="store_true", help="print all figures and problems as JSON (schema 1)")


def _clusters(add: Add) -> None:
    """List the known clusters, and this machine if it was measured."""
    add("names", nargs="*", metavar="name", help="print these clusters as files, with all numbers and their source")
    add("--accuracy", action="store_true", help="of these, names or files, or of all: what ran there beside its price")
    add("--json", action="store_true", help="print all numbers as JSON (schema 1)")


def _example(add: Add) -> None:
    """List the example models and scripts, or write some of them here."""
    add("names", nargs="*", metavar="name", help="write these here; a file that is here already is never overwritten")


def _completion(add: Add) -> None:
    """Print what lets a shell complete commands, options, files and names."""
    add("shell", choices=("bash", "zsh", "fish"), help="of which the script is printed")


def _demo(add: Add) -> None:
    """Train on real digits: one process, DDP and splitc side by side."""
    add("arguments", nargs=argparse.REMAINDER, help="see splitc demo --help")


_COMMANDS: dict[str, tuple[Callable[[Add], None], str]] = {
    "try": (of.attempt, "trying:attempt"),
    "inspect": (of.inspect, "commands:inspect"),
    "explain": (of.explain, "explaining:explain"),
    "compile": (of.compile, "commands:compile"),
    "tune": (of.tune, "tuning:tune"),
    "diff": (_diff, "diffing:diff"),
    "run": (_run, "commands:run_build"),
    "export": (_export, "exporting:export"),
    "job": (_job, "jobs:job"),
    "verify": (of.verify, "commands:verify"),
    "simulate": (of.simulate, "simulating:simulate"),
    "calibrate": (_calibrate, "calibrating:calibrate"),
    "doctor": (_doctor, "doctor:doctor"),
    "clusters": (_clusters, "clusters:clusters"),
    "example": (_example, "copying:example"),
    "completion": (_completion, "completing:completion"),
    "demo": (_demo, "examples.demo.main:demo"),
}
"""Command -> what adds its options, with its help text as docstring; its function, in a module that is loaded then."""
