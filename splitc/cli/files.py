"""Files that commands write: checked before anything runs, made of templates, and written as a whole."""

from __future__ import annotations

import os
from pathlib import Path

from splitc.errors import LaunchError

_TEMPLATES = Path(__file__).parent / "templates"


def check_writable(option: str, path: Path | None) -> None:
    """Raises LaunchError when the file that `option` names, if any, cannot be written."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise LaunchError(f"{option} {path}: there is no folder {folder}")
    if path.is_dir():
        raise LaunchError(f"{option} {path}: it is a folder; give a file")
    blocked = next((each for each in (folder, path) if each.exists() and not os.access(each, os.W_OK)), None)
    if blocked is not None:
        raise LaunchError(f"{option} {path}: {blocked} cannot be written to")


def write_file(option: str, path: Path, text: str) -> None:
    """Write the file that `option` names as a whole or not at all; raises LaunchError when that fails."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise LaunchError(f"{option} {path}: it cannot be written: {error.strerror or error}") from error


def filled(template: str, **values: object) -> str:
    """The text of a template with these values in it."""
    return (_TEMPLATES / template).read_text(encoding="utf-8").format(**values)
