"""`splitc example`: list the examples that come with splitc, or copy one here."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from splitc.cli.files import write_file
from splitc.errors import LaunchError
from splitc.ir.names import near_name

_EXAMPLES = Path(__file__).parent / "examples"


def examples() -> dict[str, Path]:
    """The examples that come with splitc, by name."""
    return {path.stem: path for path in sorted(_EXAMPLES.glob("*.py")) if path.stem != "__init__"}


def example(args: argparse.Namespace) -> int:
    """Print what there is, or write the examples asked for."""
    found = examples()
    names = [name.removesuffix(".py") for name in args.names]
    for name in names:
        if name not in found:
            raise LaunchError(f"there is no example {name!r}; {near_name(name, found)}there are {', '.join(found)}")
        if Path(f"{name}.py").exists():
            raise LaunchError(f"{name}.py is here already and was left as it is; move it, or go to another folder")
    for name in names:
        write_file("splitc example", Path(f"{name}.py"), found[name].read_text(encoding="utf-8"))
        print(f"wrote {name}.py")
    if not names:
        for name, path in found.items():
            title = (ast.get_docstring(ast.parse(path.read_bytes())) or "").partition("\n")[0]
            print(f"{name:12}  {title}")
    return 0
