"""`splitc completion`: the script by which a shell completes commands, options, files and names."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from splitc.cli.copying import examples
from splitc.cli.launching import run_options
from splitc.cli.options import whole_parser
from splitc.cost_models.clusters.files import THIS_MACHINE, known_clusters
from splitc.errors import LaunchError
from splitc.passes.planner.registry import STRATEGIES


def completion(args: argparse.Namespace) -> int:
    """Print the script of a shell."""
    if find_spec("shtab") is None:
        raise LaunchError('this needs a package that is not installed; run: pip install "splitc[completion]"')
    import shtab

    clusters, models = _either("cluster", [*known_clusters(), THIS_MACHINE], "*.toml"), _either("model", [], "*.py")
    known = {"cluster": clusters, "clusters names": clusters, "model": models, "models": models}
    known |= {"strategy": _either("strategy", STRATEGIES), "example names": _either("example", examples())}
    known |= dict.fromkeys(("FOLDER", "build", "checkpoint"), shtab.DIRECTORY)
    known |= dict.fromkeys(("FILE", "PLAN", "CLUSTER.TOML", "a", "b"), shtab.FILE)
    parser = whole_parser()
    commands: dict[str, argparse.ArgumentParser] = parser.get_default("commands")
    commands["run"]._actions += run_options()._actions
    for name, command in commands.items():
        for action in command._actions:
            for key in (f"{name} {action.dest}", action.dest, action.metavar):
                if key in known:
                    vars(action)["complete"] = known[key]
    print(shtab.complete(parser, args.shell))
    return 0


def _either(name: str, words: Iterable[str], pattern: str = "") -> dict[str, Any]:
    """How shells complete one of some words, or a file whose name matches a pattern."""
    function, listed = f"_splitc_file_{name}", " ".join(words)
    bash, zsh, fish = f'compgen -W "{listed}" -- "$1"', f"compadd -- {listed}", f"printf '%s\\n' {listed}"
    if pattern:
        bash += f'; compgen -X "!{pattern}" -f -- "$1"; compgen -d -- "$1"'
        zsh, fish = f"{zsh}; _files -g '{pattern}'", f"{fish}; __fish_complete_suffix {pattern[1:]}"
    preamble = {"bash": f"{function}() {{ {bash}; }}", "zsh": f"{function}() {{ {zsh} }}"}
    return {"bash": function, "zsh": function, "fish": f"({fish})", "preamble": preamble}
