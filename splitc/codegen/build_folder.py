"""Where a build may be written, and its replacement as a whole: what breaks off leaves the earlier build, or none."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from splitc import units
from splitc.errors import LaunchError

WEIGHTS = "weights.pt"
WORLDS = "worlds"
"""The folder of a build that holds builds for fewer ranks."""

TIMELINE = "timeline.json"
"""The file of a build that holds the spans of its predicted steps."""

FIGURES = "figures.json"
"""The file of a build that holds what its report says of layers and messages, and plan.json does not."""


def require_writable(folder: Path) -> None:
    """Raise LaunchError when a build cannot be written there."""
    if folder.exists() and not folder.is_dir():
        raise LaunchError(f"{folder} is a file; give a folder for the build: -o build")
    if folder.is_dir() and (folder.samefile(Path.cwd()) or folder.resolve().is_mount()):
        what = "the working directory" if folder.samefile(Path.cwd()) else "a mount point"
        raise LaunchError(
            f"{folder} is {what}, and a build is written aside and takes its folder's place; give a folder inside it: "
            f"-o {folder / 'build'}"
        )
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "is not a folder" if not there.is_dir() else "cannot be written to"
        raise LaunchError(f"cannot write {folder}: {there} {what}; give another folder with -o")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / WEIGHTS).is_file():
        raise no_build(folder)


def no_build(folder: Path) -> LaunchError:
    """The error that a folder is no build, and may be written over by none."""
    return LaunchError(
        f"{folder} is not empty and is no build of splitc, or lost its {WEIGHTS}, which tells what splitc wrote; give "
        f"another folder, nothing was written"
    )


@contextmanager
def replaced(folder: Path, nbytes: int) -> Iterator[Path]:
    """A folder to write `nbytes` into, beside `folder`, whose place it takes when all is written.

    Raises LaunchError, and leaves `folder` as it was, when something cannot be written.
    """
    target = folder.resolve()
    aside = target.with_name(f".{target.name}.partial")
    new, old = aside / "new", aside / "old"
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
        new.mkdir(parents=True)
        if nbytes > (free := shutil.disk_usage(aside).free):
            raise OSError(errno.ENOSPC, f"the disk is full, it has {units.nbytes(free)} left")
        yield new
        if target.exists():
            target.rename(old)
        new.rename(target)
    except (OSError, RuntimeError) as error:  # the latter of torch.save
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise LaunchError(
            f"cannot write {folder}, which needs {units.nbytes(nbytes)}: {why}; what was there is left as it was"
        ) from error
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
