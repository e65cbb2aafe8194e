"""Keep what was measured and analysed in files: `$SPLITC_CACHE`, else `$XDG_CACHE_HOME/splitc` or `~/.cache/splitc`.

An analysis is a file of text, `analysis/costs-0b5c1ea77f0e....json`, named by the digest of everything that it follows
from.  Its first line is a checksum of the rest, so a file that is cut off or was written by another program is none.
Nothing that is read is executed.  `SPLITC_CACHE=off` keeps and uses no analyses.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from splitc.runtime.journal import cache_folder as cache_folder

_LIMIT = 64_000_000  # bytes of all analyses; the oldest go first


def is_off() -> bool:
    """Whether nothing that was analysed before may be used."""
    return os.environ.get("SPLITC_CACHE") == "off"


def write_cache(path: Path, text: str) -> None:
    """Write a file as a whole, since other ranks may read meanwhile; not at all where it cannot be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)


def recall(kind: str, key: str) -> Any:
    """The JSON value that was kept under `key`; None if there is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        checksum, _, text = _path(kind, key).read_text(encoding="utf-8").partition("\n")
        if checksum == _digest(f"{kind} {key} {text}") and not is_off():
            return json.loads(text)
    return None


def keep(kind: str, key: str, value: Any) -> None:
    """Keep a JSON value under `key`."""
    if is_off():
        return
    path, text = _path(kind, key), json.dumps(value)
    write_cache(path, f"{_digest(f'{kind} {key} {text}')}\n{text}")
    with contextlib.suppress(OSError):
        found = sorted((s.st_mtime, s.st_size, each) for each in path.parent.iterdir() if (s := each.stat()))
        excess = sum(size for _, size, _ in found) - _LIMIT
        for _, size, each in found:
            if excess > 0:
                each.unlink(missing_ok=True)
                excess -= size


def digest_of(*parts: str) -> str:
    """A key for what follows from `parts`, this splitc, this torch and torch's settings."""
    return _digest("\0".join((*parts, _versions(), _settings())))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _path(kind: str, key: str) -> Path:
    return cache_folder() / "analysis" / f"{kind}-{key}.json"


@cache
def _versions() -> str:
    """The text of splitc's files, and the versions of what it runs on."""
    package = Path(__file__).parents[1]
    files = [path for room in (package, package / "passes", package / "cost_models") for path in room.rglob("*.py")]
    ours = _digest("\0".join(path.read_text(encoding="utf-8") for path in sorted(files)))
    return f"{ours} torch {torch.__version__} {torch.version.cuda} python {platform.python_version()}"


def _settings() -> str:
    """The settings of torch on which the ops that it runs depend."""
    cuda = torch.backends.cuda
    attention = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    inner = torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    return f"{torch.get_default_dtype()} {torch.get_default_device()} {attention} {inner} {torch.cuda.is_available()}"
