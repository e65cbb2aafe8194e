"""Run each command on its options."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from splitc.cli.files import check_writable
from splitc.cli.names import check_names, require_build
from splitc.codegen.build_folder import require_writable
from splitc.runtime.progress import Step


def run(args: argparse.Namespace) -> int:
    """Run the command that the options name; returns the exit code."""
    check_names(args)
    return int(resolve_name(f"splitc.cli.{args.function}")(args))


def inspect(args: argparse.Namespace) -> int:
    """Print the placement report, of several clusters that of the best one; 1 where a requirement is not met."""
    from splitc.cli.comparing import best_of, clusters_text, judged, told
    from splitc.cli.pages import figures_of, write_page
    from splitc.report.text import report

    check_writable("--html", args.html)
    program, rows = best_of(args)
    judgements = judged(args.require, rows)
    asked = {"request": program.request.fingerprint, "clusters": rows, "required": judgements}
    if args.json:
        figures = figures_of(program.validated(), args) | asked
        print(json.dumps(figures, indent=1))
        if args.html:
            write_page(args.html, figures, sys.stderr)
        return int(not all(each["met"] for each in judgements))
    shown, request = program.program, program.request.fingerprint
    print(f"{clusters_text(rows)}\n\n" * (len(rows) > 1) + report(shown, args.all, request), flush=True)
    with Step(f"validating {shown.name}", args.quiet):
        program.validated()
    if program.program is not shown:  # its examples depend on each other in a way that was not expected
        print(report(program.program, args.all, request))
    print(program.verdict)
    _print_ladder(program, args)
    if args.html:
        write_page(args.html, figures_of(program, args) | asked)
    return told(judgements)


def _print_ladder(program: Any, args: argparse.Namespace) -> None:
    """What each loss of a rank costs, where `--min-world` asks for it."""
    for each in program.ladder(args.min_world) if args.min_world else ():
        print(textwrap.fill(each.text, 80, subsequent_indent="  "))


def compile(args: argparse.Namespace) -> int:
    """Write a build."""
    folder = Path(args.output)
    require_writable(folder)
    from splitc.cli.comparing import best_of, judged, told
    from splitc.cli.compiling import listed

    program, rows = best_of(args)
    if told(judged(args.require, rows)):
        return 1
    with Step(f"writing {folder}", args.quiet):
        program.save(folder, standalone=args.standalone, min_world=args.min_world)
    plan = program.plan
    how = f"{plan.strategy}{', approximate' * (not plan.exact)}"
    print(f"{program.program.name} on {plan.world} rank{'s' * (plan.world > 1)}: {how}, plan {plan.hash}")
    if plan.prediction.advice:
        print(textwrap.fill(plan.prediction.advice, 80))
    _print_ladder(program, args)
    print(f"wrote {folder}/: {listed(program.files, args.standalone)}")
    print(f"run   splitc run {folder} --steps 3")
    start = f"torchrun --nproc-per-node {plan.world}" if plan.world > 1 else "python"
    print(f"or    {start} {folder}/launch.py --steps 3")
    return 0


def run_build(args: argparse.Namespace) -> int:
    """Train a build under torchrun."""
    require_build(Path(args.build))
    from splitc.cli.launching import launch

    return launch(Path(args.build), args.arguments)


def verify(args: argparse.Namespace) -> int:
    """Compare the ranks with one process."""
    import dataclasses

    import torch

    from splitc.cli.compiling import compiled

    program = compiled(args)
    plan = program.plan
    where = f"{plan.world} {'processes' if args.processes else 'simulated ranks'}"
    with Step(f"training {args.steps} steps on {where} and in one process", args.quiet) as step:
        dtype = getattr(torch, args.dtype) if args.dtype else None
        result = program.verify(args.processes, args.steps, dtype, args.examples, compile_stages=args.compile_stages)
    if args.json:
        print(json.dumps({**dataclasses.asdict(result), "verdict": result.verdict}, indent=1))
    else:
        roles = ", ".join(f"{role} x {len(ranks)}" for role, ranks in plan.roles.items())
        print(f"{program.program.name} on {plan.world} ranks, {plan.strategy} ({roles}), {step.seconds:.1f} s")
        for line in str(result).splitlines():
            print(textwrap.fill(line, 80, subsequent_indent=" " * 19, break_on_hyphens=False))
    return 0 if result.holds or result.bounded else 1
