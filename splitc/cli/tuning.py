"""`splitc tune`: run the finalists of a request on the ranks, and write a build of the fastest."""

from __future__ import annotations

import argparse
import json
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from splitc.cli.compiling import compiled, listed
from splitc.cli.files import check_writable
from splitc.cli.hosts import Host, parse_hosts, run_on_hosts
from splitc.cli.pages import figures_of, write_page
from splitc.codegen.build_folder import WEIGHTS, require_writable
from splitc.codegen.generate import generate
from splitc.codegen.save import require_importable
from splitc.compiled import CompiledProgram
from splitc.errors import RanksFailed
from splitc.ir.program import LoweredProgram
from splitc.report.text import tried
from splitc.runtime.launch.torchrun import torchrun
from splitc.runtime.launch.tuning import BATCH, FINALISTS, SCRIPT, take
from splitc.runtime.progress import Step
from splitc.runtime.tuning import Finalist
from splitc.tuned import finalist_of

START = 15.0  # seconds that ranks may need to start, beside what they run


def tune(args: argparse.Namespace) -> int:
    """Run the finalists and write the fastest; returns 1 when the ranks cannot be started."""
    folder = Path(args.output)
    require_writable(folder)
    check_writable("--html", args.html)
    hosts = None if args.hosts is None else parse_hosts(args.hosts, args.world)
    program = compiled(args).validated()
    require_importable(program.program, "tune")
    where = [each.name for each in hosts for _ in range(each.ranks)] if hosts else args.world * [socket.gethostname()]
    asked = program.request
    plan = None if args.again else asked.known(where)
    if plan is not None:
        best = asked.following(plan)
    else:
        with Step(f"planning finalists of {program.program.name}", args.quiet):
            programs = asked.finalists(args.finalists)
        finalists = [finalist_of(each) for each in programs]
        with tempfile.TemporaryDirectory(prefix="splitc-") as temporary:
            _run(write(Path(temporary), program, programs, finalists), programs, finalists, hosts, args)
        best = asked.chosen(programs, finalists, where)
    made = program.of(best)
    made.save(folder)
    print(f"{tried(made.plan)}\nwrote {folder}/: {listed(made.files)}\nrun   splitc run {folder} --steps 3")
    if args.html:
        write_page(args.html, figures_of(made, args))
    return 0


def write(
    folder: Path, program: CompiledProgram, programs: Sequence[LoweredProgram], finalists: Sequence[Finalist]
) -> Path:
    """All that the ranks need."""
    about = ("name", "examples", "predicted", "period")
    texts = [
        {**{key: getattr(each, key) for key in about}, "files": generate(lowered)}
        for each, lowered in zip(finalists, programs, strict=True)
    ]
    (folder / FINALISTS).write_text(json.dumps(texts), encoding="utf-8")
    (folder / "launch.py").write_text(SCRIPT, encoding="utf-8")
    torch.save(program.weights(), folder / WEIGHTS)
    torch.save({name: tensor.cpu() for name, tensor in program.request.example.tensors.items()}, folder / BATCH)
    return folder


def _run(
    folder: Path,
    programs: Sequence[LoweredProgram],
    finalists: Sequence[Finalist],
    hosts: Sequence[Host] | None,
    args: argparse.Namespace,
) -> None:
    """Run them until it is known which is the fastest, anew without one in which the ranks ended."""
    plan, left = programs[0].plan, args.budget
    with Step(f"running {len(finalists)} plans on {plan.world} ranks", args.quiet) as step:
        while True:
            begin, heard = time.monotonic(), _Heard(finalists, step.now)
            out = [word for k, each in enumerate(finalists) if each.why for word in ("--out", str(k))]
            arguments = ["--budget", f"{max(left, 1.0):g}", *out]
            if hosts is None:
                code = torchrun([str(folder / "launch.py"), *arguments], plan.world, to=heard).returncode
            else:
                code = run_on_hosts(folder, plan.hash, hosts, arguments, to=heard)
            if not code:
                return
            if heard.running is None:
                raise RanksFailed("the ranks failed before a plan ran; see above")
            failed = finalists[heard.running]
            failed.why = f"the ranks ended while it ran (exit code {code}), see above"
            print(f"splitc: {failed.name} is out, {failed.why}", file=sys.stderr)
            left -= time.monotonic() - begin - START
            if all(each.why for each in finalists) or (left <= 0 and any(each.rate for each in finalists)):
                return


@dataclass
class _Heard:
    """Takes what the ranks write: what they tell of finalists is noted, the rest printed."""

    finalists: Sequence[Finalist]
    now: Callable[[str], None]
    running: int | None = None

    def write(self, line: str) -> None:
        said = json.loads(line) if re.match(r'\{"(begins|ended)": ', line) else None
        if said is None:
            sys.stderr.write(line)
        elif "begins" in said:
            self.running = said["begins"]
            self.now(f"running {self.finalists[said['begins']].name}")
        else:
            take(self.finalists[said["ended"]], said)
            self.running = None

    flush = partial(sys.stderr.flush)
