"""Find a name that does not exist before anything is loaded: a model file, a strategy, a cluster.  Loads no torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from os.path import isdir, isfile
from pathlib import Path
from typing import Any, TypeVar

from splitc.cost_models.clusters.files import THIS_MACHINE, cluster_files
from splitc.errors import CaptureError, LaunchError, SplitcError, bullets
from splitc.ir.names import near_name
from splitc.passes.planner.registry import name_and_options

T = TypeVar("T")

FORM = "a model is given as path/model.py[:name] or package.module:name"


def check_names(args: argparse.Namespace) -> None:
    """Raise for names that do not exist, where no other option can be wrong that needs torch to be understood."""
    asked = vars(args)
    models = asked.get("models") or [asked["model"]] if {"model", "models"} & asked.keys() else []
    if not models or asked.get("pin") or asked.get("autocast"):
        return
    attempts = Attempts()
    if "strategy" in asked:
        attempts.result(name_and_options, args.strategy)
    for cluster in cluster_names(args):
        if cluster not in (None, THIS_MACHINE):
            attempts.result(cluster_files, cluster)
    for model in models:
        attempts.result(model_name, model)
    attempts.end()


def cluster_names(args: argparse.Namespace) -> list[str]:
    """The clusters that the options name, each once: none, one, or those that `inspect` compares."""
    several = args.command == "inspect" and args.cluster is not None and not isfile(args.cluster)
    return [*dict.fromkeys(map(str.strip, args.cluster.split(",")))] if several else [args.cluster]


class Attempts:
    """Reads what options say one after the other, so that all that is wrong is told at once."""

    def __init__(self) -> None:
        self.problems: list[SplitcError] = []

    def result(self, read: Callable[..., T], *given: Any) -> T | None:
        """What `read` makes of it; None where that fails."""
        try:
            return read(*given)
        except SplitcError as error:
            self.problems.append(error)
            return None

    def end(self) -> None:
        """Raise what went wrong: the one error, or a LaunchError that lists several."""
        if len(self.problems) > 1:
            raise LaunchError(bullets("this cannot be started:", map(str, self.problems)))
        for problem in self.problems:
            raise problem


def model_name(argument: str) -> tuple[Path | None, str, str]:
    """The file, or None for a module; its name; the model's name in it.  Raises CaptureError where there is none."""
    in_file = re.fullmatch(r"(.*\.py)(?::(\w*))?", argument)
    if in_file is None:
        name, colon, attribute = argument.rpartition(":")
        if colon and name and attribute:
            return None, name, attribute
        beside = Path(f"{name or argument}.py")
        hint = f"did you mean {beside}? " if isfile(beside) else ""
        raise CaptureError(f"{argument!r} names no model; {hint}{FORM}")
    file = Path(in_file[1])
    if not isfile(file):  # False for names that no file can have
        what = "is a folder" if isdir(file) else "there is no such file"
        there = [path.name for path in file.parent.glob("*.py")] if isdir(file.parent) else []
        raise CaptureError(f"{file}: {what}; {near_name(file.name, there)}{FORM}")
    return file, in_file[1], in_file[2] or "model"


def require_build(folder: Path) -> None:
    """Raise LaunchError where there is no build."""
    if not (folder / "plan.json").is_file() or not (folder / "launch.py").is_file():
        raise LaunchError(
            f"{folder} is no build of splitc (it has no plan.json and launch.py); "
            f"make one with: splitc compile MODEL --world N -o {folder}"
        )
