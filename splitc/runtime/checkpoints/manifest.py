"""What a checkpoint says of itself: which run it is of, and the checksum of each of its files."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST = ".manifest"


@dataclass(frozen=True)
class Manifest:
    """run: the same however often a run is resumed.  start: of what one process wrote.  files: their CRC-32."""

    run: str
    start: str
    files: Mapping[str, int]

    def write(self, path: Path) -> None:
        """Write it into a checkpoint, after a checksum of its own."""
        text = json.dumps(asdict(self))
        (path / MANIFEST).write_text(f"{zlib.crc32(text.encode()):08x} {text}")

    @staticmethod
    def of(path: Path) -> Manifest | None:
        """That of a checkpoint; None where it is missing or damaged, or names a file or a run of another folder."""
        with suppress(OSError, ValueError, TypeError, AttributeError):
            digest, _, text = (path / MANIFEST).read_text().partition(" ")
            found = Manifest(**json.loads(text))
            if int(digest, 16) == zlib.crc32(text.encode()) and all(map(is_beside, (found.run, *found.files.keys()))):
                return found
        return None


def owner(path: Path) -> tuple[str, ...]:
    """Which start of which run wrote a checkpoint; its name where it does not tell."""
    found = Manifest.of(path)
    return (path.name,) if found is None else (found.run, found.start)


def checksum(path: Path) -> int:
    """The CRC-32 of a file; -1 where it cannot be read."""
    value = 0
    with suppress(OSError), path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
        return value
    return -1


def is_beside(name: object) -> bool:
    """Whether a text names a file of the same folder."""
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name
