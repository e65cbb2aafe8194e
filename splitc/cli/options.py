"""Parse the commands and their options.  Quick to load: no torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from splitc.cli.help import epilog
from splitc.errors import LaunchError
from splitc.ir.names import near_name
from splitc.runtime.launch.options import positive as positive
from splitc.version import __version__

Add = Callable[..., argparse.Action]
"""Adds an option to a command."""

_MODEL = "path/model.py[:name] or package.module:name"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises LaunchError and suggests similar names."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        choice = re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)$", message)
        if choice is not None:
            known = [word.strip("' ") for word in choice[3].split(",")]
            what = "command" if choice[1] == "COMMAND" else choice[1]
            message = f"unknown {what} {choice[2]!r}; {near_name(choice[2], known)}there are {', '.join(known)}"
        raise LaunchError(f"{message}\nsee {self.prog} --help")

    def refuse_option(self, option: str, what: str) -> NoReturn:
        """Raise LaunchError that suggests similar options.  what: the problem with this one."""
        shown = [action for action in self._actions if action.help is not argparse.SUPPRESS]
        known = [text for action in shown for text in action.option_strings if text.startswith("--")]
        self.error(f"{what} {option}; {near_name(option, known)}there are {', '.join(known)}")


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
        prog="splitc", description="Compile a PyTorch model into one program for each rank.", epilog=epilog()
    )
    parser.add_argument("--version", action="version", version=f"splitc {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    parser.set_defaults(commands=commands.choices)
    for name, (text, add_options) in _COMMANDS.items():
        command: Parser = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=epilog(name), add_help=name != "demo"
        )
        command.set_defaults(parser=command)
        add_options(command.add_argument)
    return parser


def _inspect(add: Add) -> None:
    _model_options(add)
    _ladder(add)
    _require(add)
    add("--json", action="store_true", help="print the report as JSON (schema 1)")
    _html(add)
    add("--all", action="store_true", help="show every layer, also blocks that repeat")


def _explain(add: Add) -> None:
    _model_options(add, plan=False)
    add("layer", nargs="?", help="a layer's name, or a pattern of names, whose layers are placed alike: 'classifier.*'")
    add("--sensitivity", action="store_true", help="in place of a layer: where another plan is chosen")
    add("--buy", action="store_true", help="in place of a layer: what a faster network, a host, memory, a plan gain")
    add("--json", action="store_true", help="print the figures as JSON (schema 1)")


def _diff(add: Add) -> None:
    add("a", help="a plan.json, or a folder that `splitc compile` wrote")
    add("b", help="another one")
    add("--json", action="store_true", help="print the differences as JSON (schema 1)")


def _compile(add: Add) -> None:
    _model_options(add)
    add("-o", "--output", metavar="FOLDER", default="build", help="where to write them (default: build)")
    _ladder(add)
    _require(add)
    add("--standalone", action="store_true", help="copy the runtime beside the scripts: they need torch alone")


def _tune(add: Add) -> None:
    _model_options(add, plan=False)
    add("-o", "--output", metavar="FOLDER", default="build", help="where to write the fastest (default: build)")
    add("--finalists", type=positive, default=6, metavar="N", help="different plans to run, at most (default 6)")
    add("--budget", type=seconds, default=60.0, metavar="SECONDS", help="how long they run, about (default 60)")
    add("--hosts", metavar="A,B:2", help="run on these hosts over ssh, as splitc run does; :2 are ranks of one")
    _html(add)
    add("--again", action="store_true", help="run them also where it is known which is the fastest on these hosts")


def _run(add: Add) -> None:
    add("build", help="a folder that `splitc compile` wrote")
    add("arguments", nargs=argparse.REMAINDER, help="passed on to launch.py, for example --steps 3")


def _export(add: Add) -> None:
    add("checkpoint", type=Path, help="the folder of a run's checkpoints, for the newest, or one of its step-N")
    add("--torch", type=Path, metavar="FILE", help="write a file for torch.load")
    add("--safetensors", type=Path, metavar="FILE", help='write safetensors; needs: pip install "splitc[safetensors]"')
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def _job(add: Add) -> None:
    add("--sbatch", type=Path, metavar="FILE", help="write a script for Slurm's sbatch")
    add("--jobset", type=Path, metavar="FILE", help="write a JobSet for kubectl apply -f")
    add("--image", metavar="NAME", help="with --jobset: the container image, with torch, splitc and the build")
    add("--ranks-per-host", type=positive, default=0, metavar="N", help="default: those of the plan's cluster")
    add("--cpus", type=positive, default=1, metavar="N", help="cores of a rank (default 1)")
    add("--gpus", type=positive, default=0, metavar="N", help="GPUs of a rank (default: ranks compute on the CPU)")
    add("--restarts", type=positive, default=0, metavar="N", help="start again after a failure, N times at most")
    _run(add)


def _verify(add: Add) -> None:
    _model_options(add)
    add("--processes", action="store_true", help="real processes under torchrun instead of simulated ranks")
    add("--steps", type=positive, default=3, metavar="N", help="training steps (default 3)")
    add("--examples", type=positive, metavar="N", help="at most so many examples for each reader (default 8)")
    add(
        "--dtype",
        choices=("float32", "float64"),
        help="precision, without autocast; float64 proves the algebra (default: the model's)",
    )
    add("--compile-stages", action="store_true", help="the ranks run their stages under torch.compile")
    add("--json", action="store_true", help="print the result as JSON")


def _simulate(add: Add) -> None:
    add("models", nargs="+", metavar="model", help=_MODEL)
    _plan(add)
    add("--world", default="", metavar="N", help="8, or 4,8,16, or 5:80 for at most 16 worlds of it, or 5:80:5")
    add("--bandwidth", metavar="RATES", help="bits per second between hosts, 25g,40g,100g (default: the cluster's)")
    strategies = "separated by commas (default: data_parallel,layer_separation, or the plan alone)"
    add("--strategies", metavar="NAMES", help=strategies)
    add("--against", metavar="STRATEGY", help="show what the others gain over this one")
    add(
        "--cluster",
        default="v100-10gbe",
        metavar="NAME",
        help="whose devices and links: a known cluster, a .toml file or this-machine (default: v100-10gbe)",
    )
    add("--accumulate", type=positive, default=1, metavar="N", help="batches to an update (default: 1)")
    _wire(add)
    _global_batch(add)
    add("--input", metavar="SIZES", help="an example of these sizes, as for splitc compile")
    add("--trace", metavar="FILE", help="write the timeline of one plan as Chrome trace JSON (Perfetto)")
    add("--json", action="store_true", help="print all figures as JSON")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def _calibrate(add: Add) -> None:
    add("-o", "--output", metavar="FILE", default="cluster.toml", help="default: cluster.toml")
    add("--budget", type=seconds, default=90.0, metavar="SECONDS", help="how long to measure, about (default 90)")
    add("--ranks", type=positive, metavar="N", help="processes to start (default: the GPUs, else 2 to 16, as cores)")
    add("--separate", action="store_true", help="the ranks are machines of their own, and share no cores and no link")
    add("--backend", choices=("gloo", "nccl"), help="default: nccl with a GPU for each rank")
    add("--all", action="store_true", help="print every row that was measured beside its fit")
    add("--json", action="store_true", help="print the cluster and the residuals as JSON")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")


def _doctor(add: Add) -> None:
    add("--hosts", metavar="A,B:2", help="start a rank on each of these hosts over ssh; :2 are the ranks of one")
    add("--ranks", type=positive, metavar="N", help="processes to start on this machine (default 2)")
    add("--cluster", metavar="NAME", help="compare with this cluster: a known name or a .toml file")
    add("--budget", type=seconds, default=12.0, metavar="SECONDS", help="how long to measure, about (default 12)")
    add("--json", action="store_true", help="print all figures and problems as JSON (schema 1)")


def _clusters(add: Add) -> None:
    add("names", nargs="*", metavar="name", help="print these clusters as files, with all numbers and their source")
    add("--accuracy", action="store_true", help="of these, names or files, or of all: what ran there beside its price")
    add("--json", action="store_true", help="print all numbers as JSON (schema 1)")


def _example(add: Add) -> None:
    add("names", nargs="*", metavar="name", help="write these here; a file that is here already is never overwritten")


def _completion(add: Add) -> None:
    add("shell", choices=("bash", "zsh", "fish"), help="of which the script is printed")


def _demo(add: Add) -> None:
    add("arguments", nargs=argparse.REMAINDER, help="see splitc demo --help")


def _plan(add: Add) -> None:
    add("--plan", metavar="PLAN", help="follow this plan.json, or that of a build; --cluster prices it anew")


def _global_batch(add: Add) -> None:
    add(
        "--global-batch",
        type=positive,
        metavar="N",
        help="examples of a step over all ranks (default: the example's for each reader)",
    )


def _ladder(add: Add) -> None:
    add("--min-world", type=positive, metavar="N", help="plan for fewer ranks too, one by one down to N")


def _require(add: Add) -> None:
    text = "'samples/s>=400', 'step<=50ms', 'x DDP>=2', 'memory<=16GB', 'sends<=10MB'; else exit code 1; repeatable"
    add("--require", action="append", default=[], metavar="BOUND", help=text)


def _html(add: Add) -> None:
    add("--html", type=Path, metavar="FILE", help="write the report as one page, with other plans of half a minute")


def _wire(add: Add) -> None:
    add(
        "--wire",
        metavar="FORMATS",
        help="approximate: numbers travel in bf16, fp16, int8 or fp8, all or by kind, "
        "activations=bf16,errors=bf16,gradients=int8 (default: as computed)",
    )


def _model_options(add: Add, plan: bool = True, world: int | None = None) -> None:
    add("model", help=_MODEL)
    if plan:
        _plan(add)
    ranks = f"how many ranks{f' (default {world})' * bool(world)}"
    add("--world", type=positive, default=world, required=not (plan or world), metavar="N", help=ranks)
    add(
        "--cluster",
        metavar="NAME",
        help="a known cluster (see splitc clusters) or a .toml file; inspect: also several; default: this machine",
    )
    add(
        "--strategy",
        default="auto",
        help="auto, single_device, data_parallel, parameter_server, layer_separation, hybrid_single, late_multiply or "
        'modulo_shard, with options as in "layer_separation(n_c=3, n_f=1)" (default: auto, the fastest exact one)',
    )
    add(
        "--microbatches",
        type=positive,
        metavar="M",
        help="parts of each reader's batch that go through the ranks one after another (default: 1)",
    )
    add(
        "--pin",
        action="append",
        default=[],
        metavar="PATTERN=PLACEMENT",
        help="fix where the layers that match are placed: a role, 'classifier.*=fc', or parts by name, "
        "'classifier.1=holding:sharded,group:2' (role, holding, sync, group, split); the later one counts, "
        "part by part; may be repeated",
    )
    add("--accumulate", type=positive, default=1, metavar="N", help="batches to an update, at most (default: 1)")
    _global_batch(add)
    add("--memory", type=memory, metavar="SIZE", help="memory of a rank, in place of the cluster's: 16GB, 40GiB")
    mixed = "mixed precision: bfloat16 or float16 runs every forward under torch.autocast"
    add("--autocast", metavar="DTYPE", help=mixed)
    _wire(add)
    add("--wire-error", type=float, metavar="E", help="approximate: in formats with errors of gradients below E: 1e-2")
    sizes = "an example of these sizes, 4x3x224x224, or of this batch, 4; one for each input, separated by commas"
    add("--input", metavar="SIZES", help=sizes)
    add("-q", "--quiet", action="store_true", help="no progress on stderr")
    add("-v", "--verbose", action="store_true", help="time every pass and print the program after it")


_try = partial(_model_options, plan=False, world=2)

_COMMANDS: dict[str, tuple[str, Callable[[Add], None]]] = {
    "try": ("plan a model, verify it, and train ten steps on this machine", _try),
    "inspect": ("show the best placement of a model, what it costs, and why", _inspect),
    "explain": ("show what other placements of a layer would cost, and where the choice flips", _explain),
    "compile": ("write the per-rank scripts of a model", _compile),
    "tune": ("run the plans that may be the fastest for some seconds each, and write the scripts of the best", _tune),
    "diff": ("show what differs between two plans; exit code 1 when they differ", _diff),
    "run": ("train a build on this machine, under torchrun", _run),
    "export": ("write the model of a checkpoint into one file, for torch.load or as safetensors", _export),
    "job": ("write what Slurm or Kubernetes takes to train a build", _job),
    "verify": ("show that the ranks train exactly as one process does", _verify),
    "simulate": ("predict throughput over worlds, bandwidths and strategies", _simulate),
    "calibrate": ("measure devices and links, and write them as a cluster file", _calibrate),
    "doctor": ("measure all pairs of hosts before training, and say what is wrong; exit code 1 then", _doctor),
    "clusters": ("list the known clusters, and this machine if it was measured", _clusters),
    "example": ("list the example models and scripts, or write some of them here", _example),
    "completion": ("print what lets a shell complete commands, options, files and names", _completion),
    "demo": ("train on real digits: one process, DDP and splitc side by side", _demo),
}


def seconds(text: str) -> float:
    """A number of seconds, from 1 to a day."""
    value = float(text) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]*)?", text) else 0.0
    if not 1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 86400")
    return value


UNITS = {"": 1, "B": 1} | {
    f"{letter}{unit}": base ** (power + 1)
    for power, letter in enumerate("KMGT")
    for unit, base in (("", 1000), ("B", 1000), ("IB", 1024))
}


def memory(text: str) -> float:
    """`16GB`, `40GiB`, `512 MB` or a number of bytes, in bytes."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in UNITS or not 0 < float(found[1]) < 1e30:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory; write 16GB, 40GiB or a number of bytes")
    return float(found[1]) * float(UNITS[found[2].upper()])
