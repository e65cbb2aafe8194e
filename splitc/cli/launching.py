"""`splitc run`: check a build, and train or measure it under torchrun on this machine, or train it on others."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import symtable
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from splitc.cli.names import require_build
from splitc.cli.parser import Parser
from splitc.cli.plan_file import read_plan_file
from splitc.codegen.build_folder import WORLDS
from splitc.errors import LaunchError
from splitc.ir.names import near_name
from splitc.ir.plan import Plan
from splitc.runtime.errors import COMMAND, MIN_WORLD, RESTART
from splitc.runtime.launch.options import add_options, check_options, copies_every, positive, use_checkpoints

Smaller = Mapping[int, tuple[Path, str]]
"""Number of ranks -> the build for it, and the hash of its plan."""

_DYNAMIC = {"__getattr__", "globals", "exec", "vars"}  # what defines names that a module's text does not show


def launch(folder: Path, arguments: Sequence[str]) -> int:
    """Train the build, again when a rank fails and restarts are left; returns the exit code of launch.py.

    Raises LaunchError for mistakes, before any process starts.
    """
    plan = check_build(folder)
    script = folder / "launch.py"
    own, others = _own_options().parse_known_args(arguments)
    if "launch.main(" in script.read_text(encoding="utf-8", errors="replace"):  # else it is the user's own
        args = _check_arguments(arguments)
        if args.neighbour_copy:
            copies_every(args.neighbour_copy, plan.accumulate * plan.period)
        if args.measure or args.measured:
            from splitc.cli.measuring import measure

            return measure(folder, plan, args, measuring_options().parse_known_args(arguments)[1])
        if own.restarts:  # copies of the build are made anew, and hold no checkpoints
            there = args.checkpoints.absolute() if own.hosts else args.checkpoints
            others += ["--resume", "--checkpoints", str(there)]
    smaller = _smaller(folder, plan, own) if own.min_world else {}
    os.environ[COMMAND] = shlex.join(["splitc", "run", str(folder), *arguments])
    restarts = 0
    while True:
        code = _start(folder, plan, own.hosts, others, smaller if restarts else None)
        if code == RESTART and restarts < own.restarts:
            restarts += 1
            print(f"restart {restarts} of {own.restarts}", file=sys.stderr, flush=True)
        elif code >= 0:  # else hosts are back
            return code


def _smaller(folder: Path, plan: Plan, own: argparse.Namespace) -> Smaller:
    """The builds for fewer ranks that `--min-world` allows.  Raises LaunchError where there are none to go on with."""
    if not own.hosts or not own.restarts:
        raise LaunchError(
            "--min-world is for hosts that are lost: give --hosts A,B,C and --restarts N too; ranks that fail on one "
            "machine, --restarts starts again by itself"
        )
    found = {}
    for path in sorted((folder / WORLDS).glob("[0-9]*")):
        each = check_build(path)
        if each.world >= own.min_world:
            found[each.world] = path, each.hash
            _same_script(folder / "launch.py", path / "launch.py")
    if not found:
        raise LaunchError(
            f"--min-world {own.min_world}: {folder} has no build for so many ranks that are fewer than {plan.world}; "
            f"compile it with --min-world"
        )
    os.environ[MIN_WORLD] = str(own.min_world)
    return found


def _same_script(*paths: Path) -> None:
    """Raise LaunchError where two launch.py train otherwise, of which only the head may differ."""
    texts = [re.split(r"^PLAN = .*$", path.read_text(encoding="utf-8"), maxsplit=1, flags=re.M)[-1] for path in paths]
    if texts[0] != texts[1]:
        raise LaunchError(f"{paths[1]} trains otherwise than {paths[0]} below its PLAN; edit both alike")


def _start(folder: Path, plan: Plan, hosts: str | None, arguments: Sequence[str], smaller: Smaller | None) -> int:
    """Run a build once.  smaller: as of `run_on_hosts`; None: the first start, where a lost host is an error."""
    if hosts is None:
        from splitc.runtime.launch.torchrun import torchrun

        return torchrun([str(folder / "launch.py"), *arguments], plan.world, saves=True).returncode
    from splitc.cli.hosts import parse_hosts, run_on_hosts

    try:
        given = parse_hosts(hosts, plan.world)
        return run_on_hosts(folder, plan.hash, given, arguments, smaller=smaller or {})
    except LaunchError as error:
        if smaller is None:
            raise
        print(f"splitc: {error}", file=sys.stderr, flush=True)
        time.sleep(10.0)  # a host may be back then
        return RESTART


def check_build(folder: Path) -> Plan:
    """Read the plan of a build, and check that all its files exist and were written from that plan."""
    require_build(folder)
    plan = read_plan_file(folder / "plan.json")
    ranks = [f"rank{rank}.py" for rank in range(plan.world)]
    parts = [f"{'_'.join(roles)}.py" for roles in plan.ranks_by_roles]
    if missing := [name for name in (*parts, *ranks, "weights.pt") if not (folder / name).is_file()]:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise LaunchError(f"{folder} has no {', '.join(missing[:4])}{more}; compile the model again")
    _same_plan(folder, plan)
    _require_own_code(folder, parts)
    return plan


def _require_own_code(folder: Path, parts: Sequence[str]) -> None:
    """Raise LaunchError where the ranks cannot find the modules of the user that the build runs."""
    texts = [(folder / name).read_text(encoding="utf-8", errors="replace") for name in parts]
    needed = {name for text in texts for name in re.findall(r'\b(?:model|loss)="(\w+)[\w.]*:', text)}
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(folder), *filter(None, given), *(path for path in sys.path if path not in ("", os.getcwd()))]
    if missing := sorted(name for name in needed if PathFinder.find_spec(name, paths) is None):
        raise LaunchError(
            f"{folder} runs the user's own code of {', '.join(missing)}, which its ranks cannot import; put the folder "
            f"of {missing[0]} into PYTHONPATH, or copy it into {folder}"
        )


def _same_plan(folder: Path, plan: Plan) -> None:
    from splitc.runtime.launch.loader import one_plan

    try:
        one_plan(folder)
    except LaunchError as error:
        raise LaunchError(f"{folder}: {error}") from error
    if f'"hash": "{plan.hash}"' not in (folder / "plan.json").read_text(encoding="utf-8"):
        raise LaunchError(
            f"{folder}/plan.json was edited after the scripts were written from it; "
            f"write them anew with: splitc compile MODEL --plan {folder}/plan.json -o OTHER_FOLDER"
        )


def measuring_options() -> Parser:
    """The options that `splitc run` handles itself and does not pass to launch.py."""
    parser = Parser(add_help=False)
    add = parser.add_argument
    record = "record what each rank computes, waits for and sends, and print it beside the prediction; "
    add("--measure", action="store_true", help=f"{record}the first 3 steps are left out")
    add("--measured", type=Path, metavar="FILE", help="print likewise what launch.py --measure FILE wrote on any hosts")
    add("--trace", type=Path, metavar="FILE", help="with --measure: write the last steps as a Chrome trace")
    correct = "with --measure: correct this cluster file by what was measured, or write a new one"
    add("--correct", type=Path, metavar="CLUSTER.TOML", help=correct)
    add("--json", action="store_true", help="with --measure: print the comparison as JSON (schema 1)")
    add("--html", type=Path, metavar="FILE", help="with --measure: write the comparison as one page")
    return parser


def _own_options() -> Parser:
    parser = Parser(add_help=False)
    add = parser.add_argument
    add("--hosts", metavar="A,B:2", help="copy the build to these hosts over ssh and run it; :2 are ranks of one")
    again = "go on from the last checkpoint after a failure, N times at most"
    add("--restarts", type=positive, default=0, metavar="N", help=again)
    add("--min-world", type=positive, metavar="N", help="without hosts that are lost go on with N ranks or more")
    return parser


def run_options() -> Parser:
    """All options of `splitc run`, those of launch.py too."""
    parser = Parser(prog="splitc run BUILD", add_help=False, parents=[measuring_options(), _own_options()])
    add_options(parser)
    return parser


def _check_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse all options, and reject once what every rank would reject."""
    parser = run_options()
    parser.add_argument("-h", "--help", action="help")
    args = parse_launch(parser, arguments)
    for option, given in (("--data", args.data), ("--eval-data", args.eval_data), ("--optimizer", args.optimizer)):
        if given is not None:
            check_data(given, option)
    use_checkpoints(args, args.restarts)
    check_options(args)
    if args.measure and args.restarts:
        parser.error("--restarts is for training; leave out --measure")
    if args.measure and args.hosts:
        parser.error("--measure runs on this machine; on several start launch.py --measure FILE, then --measured FILE")
    for name in ("trace", "correct", "json", "html"):
        if getattr(args, name) and not (args.measure or args.measured):
            parser.error(f"--{name} belongs to --measure, which is not there")
    return args


def parse_launch(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of launch.py, and what else a parser has.  Raises LaunchError for others."""
    args, unknown = parser.parse_known_args(arguments)
    if unknown and unknown[0].partition("=")[0] == "--autocast":
        parser.error(
            "a build has its precision in its scripts; compile it with: splitc compile MODEL --autocast bfloat16"
        )
    if unknown:
        parser.refuse_option(unknown[0], "launch.py has no option")
    return args


def check_data(name: str, option: str) -> None:
    """Raises LaunchError when `module:function` cannot be found.  The module is read and not run."""
    module, _, function = name.partition(":")
    if not module or not function.isidentifier():
        raise LaunchError(f"{option} {name}: write module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise LaunchError(f"{option} {name}: {error}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if spec is None:
        raise LaunchError(f"{option} {name}: there is no module {module} here or among the installed packages")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    text = Path(spec.origin).read_text(encoding="utf-8")
    try:
        symbols = symtable.symtable(text, spec.origin, "exec").get_symbols()
    except SyntaxError as error:
        raise LaunchError(
            f"{option} {name}: {Path(spec.origin).name}:{error.lineno} is no Python: {error.msg}"
        ) from error
    names = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    depends_on_running = "import *" in text or not _DYNAMIC.isdisjoint(each.get_name() for each in symbols)
    if function not in names and not depends_on_running:
        functions = ", ".join(sorted(n for n in names if not n.startswith("_"))) or "nothing"
        raise LaunchError(
            f"{option} {name}: {module} has no {function}; {near_name(function, names)}it has {functions}"
        )
