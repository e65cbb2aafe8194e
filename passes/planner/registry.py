"""The strategies that there are, by name.  Loads none of them, nor torch."""

from __future__ import annotations

import re

from splitc.errors import PlacementError
from splitc.ir.names import near_name

STRATEGIES = {
    "single_device": "SingleDevice",
    "data_parallel": "DataParallel",
    "parameter_server": "ParameterServer",
    "layer_separation": "LayerSeparation",
    "hybrid_single": "HybridSingle",
    "modulo_shard": "ModuloShard",
    "late_multiply": "LateMultiply",
    "mixed": "Mixed",
    "local_sgd": "LocalSGD",
    "sites": "Sites",
    "independent_subnets": "IndependentSubnets",
    "auto": "Auto",
}
"""Name -> its class in `splitc/strategies/<name>.py`; in the order in which equals win."""

_EXAMPLE = "layer_separation(n_c=3, n_f=1)"


def name_and_options(text: str) -> tuple[str, str]:
    """`"data_parallel(microbatches=2)"` -> ("data_parallel", "microbatches=2").

    Raises PlacementError for an unknown strategy.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if match is not None and match[1] in STRATEGIES:
        return match[1], match[2] or ""
    name = text.partition("(")[0].strip()
    if name in STRATEGIES:
        instead = f"write its options in parentheses, as in {_EXAMPLE}"
    else:
        there = f"there are {', '.join(sorted(STRATEGIES))}, with options as in {_EXAMPLE}"
        instead = f"{near_name(name, STRATEGIES)}{there}"
    raise PlacementError(f"unknown strategy {text!r}; {instead}")
