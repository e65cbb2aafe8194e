"""Format quantities for display.  Elsewhere they are in SI base units without prefixes."""


def _scaled(value: float, step: float, names: tuple[str, ...]) -> str:
    index = 0
    while abs(value) >= step and index < len(names) - 1:
        value /= step
        index += 1
    digits = 0 if index == 0 or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {names[index]}"


def nbytes(value: float) -> str:
    """`234_500_000` -> `234 MB` (SI, powers of ten)."""
    return _scaled(value, 1e3, ("B", "kB", "MB", "GB", "TB", "PB"))


def count(value: float) -> str:
    """`58_631_144` -> `58.6 M`."""
    return _scaled(value, 1e3, ("", "k", "M", "G", "T", "P", "E")).strip()


def flops(value: float) -> str:
    """`2.4e11` -> `240 GFLOP`."""
    return _scaled(value, 1e3, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def seconds(value: float) -> str:
    """`0.00031` -> `310 us`."""
    for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {name}"
    return "0 s" if value == 0 else f"{value * 1e9:.3g} ns"


def bandwidth(value: float) -> str:
    """Bytes per second as the network's bits per second: `1.25e9` -> `10.0 Gbit/s`."""
    return _scaled(value * 8, 1e3, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def numbered(number: int, what: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
