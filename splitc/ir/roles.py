"""Names of a plan's roles, and the names by which a pin may ask for them.

one role         all
two roles        conv, fc where the model has convolutions, else trunk, head
more             stage0, stage1, ...
"""

from __future__ import annotations

from torch.nn.modules.conv import _ConvNd

from splitc.ir.graph import called_module, op_name
from splitc.ir.program import Program

MAX_STAGES = 6
"""How many roles a pin can tell apart."""

_TWO = (("conv", "fc"), ("trunk", "head"))

STAGE_OF_ROLE: dict[str, int] = {
    **{name: stage for names in _TWO for stage, name in enumerate(names)},
    **{f"stage{stage}": stage for stage in range(MAX_STAGES)},
    **{f"fc{stage}": stage for stage in range(2, MAX_STAGES)},
}
"""Role, as a pin may name it -> its place on the data's way."""

ROLES = ("all", "worker", *STAGE_OF_ROLE)
"""The names of roles in plans that are made here."""


def has_convolutions(program: Program) -> bool:
    """Whether a layer of the model convolves, as a module or as a function."""
    functions = (op_name(node) for node in program.graph.nodes if node.op == "call_function")
    modules = (called_module(program.root, node) for node in program.graph.nodes)
    return any(isinstance(each, _ConvNd) for each in modules) or any(name.startswith("conv") for name in functions)


def role_names(count: int, convolutions: bool) -> tuple[str, ...]:
    """The names of `count` roles, in the order in which data passes through them."""
    if count == 1:
        return ("all",)
    if count == 2:
        return _TWO[0 if convolutions else 1]
    return tuple(f"stage{stage}" for stage in range(count))


def ranks_text(ranks: tuple[int, ...]) -> str:
    """`(0, 1, 2)` -> `ranks 0 to 2`."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {' '.join(map(str, ranks))}"
