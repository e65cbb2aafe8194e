"""Fill markup with text: what is not markup already is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

Figures = Mapping[str, Any]
"""What `--json` prints, or a table in it."""


class Html(str):
    """Markup, which is not escaped again."""

    __slots__ = ()


def html(markup: str, *given: object, **named: object) -> Html:
    """Fill the `{}` of some markup."""
    return Html(markup.format(*map(_safe, given), **{name: _safe(each) for name, each in named.items()}))


def _safe(given: object) -> str:
    return given if isinstance(given, Html) else escape(str(given))


def every(markup: str, rows: Iterable[Iterable[object]]) -> Html:
    """Fill the markup with each row, and join them."""
    return Html("".join(html(markup, *row) for row in rows))


def joined(parts: Iterable[object]) -> Html:
    return every("{}", ([part] for part in parts))


def table(caption: str, headers: str, rows: Iterable[Sequence[object]], look: str = "") -> Html:
    """Return a table that scrolls by itself where it is too wide; the first cell of a row is its header.

    headers: separated by `|`; `#` marks columns of numbers.
    """
    looks = ["n" if name.startswith("#") else "t" for name in headers.split("|")]
    top = every('<th scope="col" class="{}">{}</th>', zip(looks, headers.replace("#", "").split("|"), strict=True))
    cells = ((row[0], every('<td class="{}">{}</td>', zip(looks[1:], row[1:], strict=True))) for row in rows)
    lines = every('<tr><th scope="row">{}</th>{}</tr>\n', cells)
    return html(
        '<div class="scroll {}" tabindex="0" role="region" aria-label="{}"><table><caption><span>{}</span></caption>'
        "<thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>\n",
        *(look, caption, caption, top, lines),
    )


def bar(share: float, look: str = "own", error: float = 0.0, mark: float = 0.0) -> Html:
    """Return a bar of a share of the width, with a whisker of `error` to both sides, and a mark at another share."""
    whisker = '<line x1="{:.2%}" x2="{:.2%}" y1="10" y2="10" class="whisker"></line>'
    ends = Html(whisker.format(share * (1 - error), share * (1 + error)) if error else "")
    dot = Html(f'<circle cx="{mark:.2%}" cy="10" r="5" class="mark"></circle>' if mark else "")
    return html(
        '<svg class="bar" height="20" width="100%" aria-hidden="true">'
        '<rect width="{}" height="12" y="4" rx="2" class="{}"></rect>{}{}</svg>',
        *(f"{share:.2%}", look, ends, dot),
    )
