"""Share examples, or rows, out to ranks."""

from __future__ import annotations


def share_out(total: int, parts: int) -> tuple[int, ...]:
    """Bounds of `parts` nearly equal shares of `total`; the first ones are the larger: (10, 3) -> (0, 4, 7, 10)."""
    small, extra = divmod(total, parts)
    return tuple(part * small + min(part, extra) for part in range(parts + 1))


def serve(bounds: tuple[int, ...], servers: int) -> tuple[int, ...]:
    """Bounds of the examples that each of `servers` ranks takes over from producers with `bounds`.

    Each server takes whole producers while there are enough of them (Stanza 4.1.3), the first ones one more where it
    does not divide; with more servers than producers the examples are shared out evenly.
    """
    producers = len(bounds) - 1
    if servers > producers:
        return share_out(bounds[-1], servers)
    return tuple(bounds[p] for p in share_out(producers, servers))
