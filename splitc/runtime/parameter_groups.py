"""Call an optimizer factory with the whole model's parameters, of which a rank then keeps its own.

So options that follow from names, positions or the number of parameters are those of one process, and every rank has
the same groups in the same order, those without a parameter of its own too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn, optim

from .errors import LaunchError
from .spec import Shard
from .transport.base import Transport
from .whole_state import wholes

Named = list[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[Named], optim.Optimizer]
"""Called with named parameters."""

Whole = dict[str, nn.Parameter]  # the model's parameters on meta, in its order
Groups = list[list[str]]  # the names in each group of the whole model

_FACTORY = "the optimizer's factory"


def gather_likes(transport: Transport, own: Mapping[str, tuple[Tensor, Shard | None]]) -> Whole:
    """The whole model's parameters, of which this rank has those in `own`, or parts of them.  Collective."""
    likes = {name: (p.detach().to("meta").requires_grad_(p.requires_grad), shard) for name, (p, shard) in own.items()}
    whole = transport.broadcast_object(wholes(transport.gather_objects(likes) or ()))
    return {name: nn.Parameter(like, like.requires_grad) for name, like in whole.items()}


def call(factory: OptimizerFactory, whole: Whole, own: Named) -> tuple[optim.Optimizer, Groups]:
    """The optimizer of `own` alone, which the factory makes with the other parameters on meta.

    own: under names of `whole`, in whose order all are given.
    Raises LaunchError when the factory changes parameters, or returns something else.
    """
    given = list({**whole, **dict(own)}.items())
    before = [_seen(p) for _, p in given]
    try:
        optimizer = factory(list(given))
    except Exception as error:
        if len(own) == len(given):
            raise
        raise LaunchError(
            f"{_FACTORY} fails, {type(error).__name__}: {error}; it is called with all parameters of the model, of "
            f"which those of other ranks have names, shapes and dtypes, but no values"
        ) from error
    for name in [name for (name, p), seen in zip(given, before, strict=True) if _seen(p) != seen][:1]:
        raise LaunchError(f"{_FACTORY} puts a hook on {name}, or freezes it; a rank has a part of its gradient")
    if not hasattr(optimizer, "param_groups"):
        raise LaunchError(f"{_FACTORY} returns a {type(optimizer).__name__}; let it return an optimizer")
    names, kept = {id(p): name for name, p in given}, {id(p) for _, p in own}
    groups = [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        stays = [id(p) in kept or id(p) not in names for p in group["params"]]
        for values in (group[key] for key in ("param_names", "params") if key in group):
            values[:] = [value for value, stay in zip(values, stays, strict=True) if stay]
    for foreign in [p for p in optimizer.state if id(p) in names and id(p) not in kept]:
        del optimizer.state[foreign]
    return optimizer, groups


def require_alike(own: tuple[optim.Optimizer, Groups], whole: tuple[optim.Optimizer, Groups]) -> None:
    """Raise LaunchError where a factory gives parameters of this rank other options than it gives to whole ones."""
    expected = _told(*whole)
    for (name, key), value in _told(*own).items():
        if value != (other := expected.get((name, key))):
            raise LaunchError(f"{_FACTORY} gives {name} {key}={value}, and {other} among whole parameters; go by names")


def _told(optimizer: optim.Optimizer, groups: Groups) -> dict[tuple[str, str], Any]:
    """The group and the plain options of each parameter."""
    every = [{"group": k, **options_of(group)} for k, group in enumerate(optimizer.param_groups)]
    named = ((name, options) for options, names in zip(every, groups, strict=True) for name in names)
    return {(name, k): v for name, own in named for k, v in own.items() if isinstance(v, (int, float, str, tuple))}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group's parameters share."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _seen(p: Tensor) -> tuple[bool, int]:
    """Whether a parameter is trained, and how many hooks it has."""
    return p.requires_grad, len(p._backward_hooks or ()) + len(getattr(p, "_post_accumulate_grad_hooks", None) or ())
