"""The command line: `splitc inspect`, `compile`, `run`, `verify`, `demo`.

Exit codes: 0 done; 1 a run failed or a verification does not hold; 2 the input is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitc.errors import SplitcError
from splitc.version import __version__

if TYPE_CHECKING:
    from splitc.api import CompiledProgram

_MODEL = "path/model.py[:name] or package.module:name"
_EPILOG = """examples:
  splitc inspect examples/alexnet.py --world 4 --cluster v100-10gbe
  splitc compile examples/alexnet.py --world 4 --strategy layer_separation -o build
  torchrun --nproc-per-node 4 build/launch.py --steps 3
  splitc verify examples/mlp.py --world 4
  splitc demo
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return int(args.command(args))
    except SplitcError as error:
        print(f"splitc: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("splitc: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, `| head` for example
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="splitc",
        description="Compile a PyTorch model into one program for each rank.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"splitc {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    inspect = _command(commands, "inspect", _inspect, "show the best placement of a model, and why")
    _model_options(inspect)
    inspect.add_argument("--json", action="store_true", help="print the report as JSON (schema 1)")

    build = _command(commands, "compile", _compile, "write the per-rank scripts of a model")
    _model_options(build)
    build.add_argument("-o", "--output", metavar="FOLDER", default="build", help="where to write them (default: build)")
    build.add_argument("--plan", metavar="PLAN.JSON", help="compile this plan instead of choosing one")
    build.add_argument(
        "--standalone", action="store_true", help="copy the runtime beside the scripts: they need torch alone"
    )

    run = _command(commands, "run", _run, "train a build on this machine, under torchrun")
    run.add_argument("build", help="a folder that `splitc compile` wrote")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to launch.py, for example --steps 3")

    verify = _command(commands, "verify", _verify, "show that the ranks train exactly as one process does")
    _model_options(verify)
    verify.add_argument(
        "--processes", action="store_true", help="real processes under torchrun instead of simulated ranks"
    )
    verify.add_argument("--steps", type=_positive, default=3, help="training steps (default 3)")
    verify.add_argument(
        "--examples", type=_positive, metavar="N", help="at most so many examples for each reader (default 8)"
    )
    verify.add_argument(
        "--dtype", choices=("float32", "float64"), help="precision; float64 proves the algebra (default: the model's)"
    )
    verify.add_argument("--json", action="store_true", help="print the result as JSON")

    demo = _command(commands, "demo", _demo, "train on real digits: one process, DDP and splitc side by side")
    demo.add_argument("arguments", nargs=argparse.REMAINDER, help="see splitc demo --help")
    return parser


def _command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", add_help=name != "demo"
    )
    parser.set_defaults(command=function)
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=_MODEL)
    parser.add_argument("--world", type=_positive, required=True, metavar="N", help="how many ranks")
    parser.add_argument(
        "--cluster", metavar="NAME", help="a known cluster or a .toml file (default: this machine, measured once)"
    )
    parser.add_argument(
        "--strategy", default="auto", help='for example "layer_separation(n_c=3,n_f=1)" (default: auto)'
    )
    parser.add_argument(
        "--global-batch",
        type=_positive,
        metavar="N",
        help="examples of a step over all ranks (default: the example's for each reader)",
    )
    parser.add_argument(
        "--pin", action="append", default=[], metavar="PATTERN=ROLE", help="place matching layers in a role"
    )
    parser.add_argument("--memory", type=float, metavar="BYTES", help="memory of a rank, in place of the cluster's")
    parser.add_argument(
        "--input", metavar="SIZES", help="an example of these sizes, 32x3x224x224, in place of the file's"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="time every pass and print the program after it")


def _positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _program(args: argparse.Namespace, plan_path: str | None = None) -> CompiledProgram:
    from splitc.api import Settings, compile_example
    from splitc.model_file import load_model
    from splitc.strategies import parse_strategy

    settings = Settings(
        args.world, args.global_batch, args.cluster, parse_strategy(args.strategy), _pins(args.pin), args.memory
    )
    plan = _read_plan(plan_path, args.world) if plan_path else None
    file = load_model(args.model, args.input)
    return compile_example(
        file.model,
        file.example,
        file.target,
        file.loss,
        settings,
        name=file.name,
        plan=plan,
        watch=_watch if args.verbose else None,
    )


def _read_plan(path: str, world: int) -> Any:
    from splitc.errors import LaunchError
    from splitc.plan import Plan

    try:
        plan = Plan.from_json(Path(path).read_text())
    except OSError as error:
        raise LaunchError(f"cannot read the plan {path}: {error}") from error
    if plan.world != world:
        raise LaunchError(f"{path} is a plan for {plan.world} ranks, not for --world {world}")
    return plan


def _watch(each: Any, program: Any, seconds: float) -> None:
    from splitc.printer import print_program

    print(f"# {each.name}: {seconds:.3f} s\n{print_program(program)}", file=sys.stderr)


def _pins(pairs: Sequence[str]) -> dict[str, str]:
    from splitc.errors import PlacementError

    pins = {}
    for pair in pairs:
        pattern, equals, role = pair.rpartition("=")
        if not equals or not pattern or not role:
            raise PlacementError(f"--pin {pair}: write PATTERN=ROLE, for example 'classifier.*=fc'")
        pins[pattern] = role
    return pins


def _inspect(args: argparse.Namespace) -> int:
    from splitc.report import as_json

    program = _program(args)
    print(
        json.dumps(as_json(program.program), indent=1) if args.json else program.report(), end="\n" if args.json else ""
    )
    return 0


def _compile(args: argparse.Namespace) -> int:
    program = _program(args, args.plan)
    folder = program.save(args.output, standalone=args.standalone)
    plan = program.plan
    files = " ".join([*(f"{role}.py" for role in plan.roles), f"rank0.py..rank{plan.world - 1}.py", "launch.py"])
    print(f"{program.program.name} on {plan.world} ranks: {plan.strategy}, plan {plan.hash}")
    print(f"wrote {folder}/: {files}")
    print(f"run   torchrun --nproc-per-node {plan.world} {folder}/launch.py --steps 3")
    return 0


def _run(args: argparse.Namespace) -> int:
    from splitc.build import read_plan
    from splitc.runtime.trial import torchrun

    folder = Path(args.build)
    plan = read_plan(folder)
    return torchrun([str(folder / "launch.py"), *args.arguments], plan.world).returncode and 1


def _verify(args: argparse.Namespace) -> int:
    import dataclasses

    import torch

    program = _program(args)
    begin = time.perf_counter()
    result = program.verify(
        processes=args.processes,
        steps=args.steps,
        examples=args.examples,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
    )
    if args.json:
        print(json.dumps(dataclasses.asdict(result), indent=1))
    else:
        plan = program.plan
        roles = ", ".join(f"{role} x {len(ranks)}" for role, ranks in plan.roles.items())
        print(
            f"{program.program.name} on {plan.world} ranks, {plan.strategy} ({roles}), "
            f"{time.perf_counter() - begin:.1f} s\n{result}"
        )
    return 0 if result.holds else 1


def _demo(args: argparse.Namespace) -> int:
    from splitc.demo.main import main as demo

    return demo(args.arguments)


if __name__ == "__main__":
    sys.exit(main())
