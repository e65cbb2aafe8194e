"""Names: those that generated code may give to variables, attributes and files, texts in it, and near misses."""

from __future__ import annotations

import difflib
import keyword
import re
import sys
import unicodedata
from collections.abc import Iterable

RESERVED = {
    *("comm", "rank", "self", "stage", "step", "evaluate", "torch", "nn", "F", "operator", "Stage", "Tree"),
    *("BUCKETS", "SERVED", "EVERY_MICROBATCH", "TIED"),
}
"""Names that generated forwards cannot give to a value."""

_OURS = RESERVED | {
    *("loss", "losses", "total", "_", "all", "conv", "fc", "trunk", "head", "worker", "server", "idle"),
    *("served", "launch", "plan", "weights", "splitc", "numpy"),
}
_FORMS = re.compile(r"(rank|stage|fc|(d_)?cut)\d+|\w*(_BUCKETS|_slice|_group)")
_END = re.compile(r"\w*_(all|worker|conv|fc|trunk|head|(stage|fc)\d+)")


def is_ours(name: str) -> bool:
    """Whether generated code could have a variable, a constant or a file of this name for itself."""
    return name in _OURS or bool(_FORMS.fullmatch(name) or _END.fullmatch(name))


def is_role(name: object, known: Iterable[str]) -> bool:
    """Whether generated files and variables may have the name of a role.  known: the roles of plans made here."""
    if not isinstance(name, str) or not re.fullmatch("[a-z][a-z0-9_]*", name):
        return False
    if name in known or re.fullmatch(r"stage\d+", name):
        return True
    return not (keyword.iskeyword(name) or is_ours(name) or name in sys.stdlib_module_names or "__" in name)


def is_attribute(name: str) -> bool:
    """Whether `self.name` in a class means the attribute of that very name."""
    is_plain = name.isidentifier() and not keyword.iskeyword(name) and unicodedata.normalize("NFKC", name) == name
    return is_plain and not name.startswith("__")


def printable(text: str) -> str:
    """`text` on one line: characters that are not printed are written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def quoted(text: str) -> str:
    """A string literal of any text."""
    return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def prose(text: str) -> str:
    """Any text as part of a docstring, which it cannot end."""
    return re.sub('""+', lambda quotes: '\\"' * len(quotes[0]), printable(text.replace("\\", "\\\\")))


def near_name(wrong: str, known: Iterable[str]) -> str:
    """`did you mean layer_separation? `, to stand before what there is; nothing when no name is near."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(wrong.lower(), names, 1)
    return f"did you mean {names[near[0]]}? " if near else ""
