"""A parser of options, and the types of their values.  Quick to load: no torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn

from splitc.errors import LaunchError
from splitc.ir.names import near_name

Add = Callable[..., argparse.Action]
"""Adds an option to a command."""


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
