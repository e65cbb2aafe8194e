"""`--html`: the report as a page, of the figures that `--json` prints beside it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from splitc.cli.files import write_file
from splitc.compiled import CompiledProgram
from splitc.report.figures import as_json
from splitc.report.grid import what_if
from splitc.report.html.page import page
from splitc.report.step import figures_of_step
from splitc.runtime.progress import Step


def figures_of(program: CompiledProgram, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of a report, with those that a page shows beside them where one is asked for."""
    figures, settings = as_json(program.program), program.request.settings
    if vars(args).get("min_world"):
        figures["ladder"] = [{"world": each.world, "text": each.text} for each in program.ladder(args.min_world)]
    if args.html:
        figures |= figures_of_step(program.program)
        if vars(args).get("plan") is None:
            with Step(f"planning {program.program.name} with other links, batches and worlds", args.quiet):
                place = replace(settings, wire=program.plan.wire).place()
                figures["what_if"] = what_if(place, program.analysed(), program.plan)
    return figures


def write_page(path: Path, figures: Mapping[str, Any], said: TextIO | None = None) -> None:
    """Write the page and say so.  said: where; None: on stdout."""
    write_file("--html", path, page(figures))
    print(f"wrote {path}: the report, which any browser opens", file=said or sys.stdout)
