"""The optimizers of a rank: what their factory is given, and whether they work where a rank has a part of the model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn, optim

from .errors import LaunchError
from .parameter_groups import Groups, Named, OptimizerFactory, Whole, call, require_alike

Made = tuple[dict[str, optim.Optimizer], optim.Optimizer | None, Groups]

STEP = ""
"""Stands for a role where parameters are updated once a step."""

ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    *(optim.SGD, optim.ASGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.SparseAdam),
)
"""Optimizers of torch whose update of an element reads nothing of other elements; a subclass is another optimizer."""

_TRIED = 12
"""Parameters that a trial of an optimizer updates at most."""

_STEPS = 60
"""Steps of a trial: more than optimizers wait that do something every few steps."""


def make_optimizers(
    factory: OptimizerFactory,
    named: Named,
    whole: Whole,
    by_role: Mapping[str, Collection[str]],
    divided: Sequence[str],
    is_whole: bool,
) -> Made:
    """Role -> the optimizer that it updates its parameters with itself; `STEP` -> that of all others.

    Beside them the one that schedulers follow, of no parameters where this rank updates none once a step, and the
    groups of the whole model.

    whole: the model's parameters, in its order.  by_role: role -> those parameters.  divided: the parameters
    of which this rank updates a part only.  is_whole: whether nothing need be known of the update: this rank has the
    whole model, or the user vouches for it.
    Where nothing is trained there is no optimizer.  Raises LaunchError for an optimizer that updates other parameters,
    or reads more of the model than this rank has.
    """
    role_of = {name: role for role, names in by_role.items() for name in names}
    made: dict[str, tuple[optim.Optimizer, Groups]] = {}
    for role in (STEP, *by_role):
        parameters = [(name, parameter) for name, parameter in named if role_of.get(name, STEP) == role]
        if any(parameter.requires_grad for _, parameter in parameters):
            found = None if is_whole else _try(factory, whole, parameters, divided)
            made[role] = call(factory, whole, parameters)
            _check(made[role][0], parameters, found)
    scheduled = made.get(STEP)
    if whole and not (is_whole and scheduled):
        of_none = call(factory, whole, [])
        scheduled = scheduled or of_none
        for each in made.values() if not is_whole else ():
            require_alike(each, of_none)
    return ({role: optimizer for role, (optimizer, _) in made.items()}, *(scheduled or (None, [])))


def _check(optimizer: optim.Optimizer, given: Named, found: str | Exception | None) -> None:
    """Raise LaunchError unless the optimizer's parameters are those that its factory was given.  found: by `_try`."""
    name, groups = type(optimizer).__name__, optimizer.param_groups
    if isinstance(optimizer, optim.LBFGS):
        raise LaunchError(
            "LBFGS evaluates the loss several times a step and over all parameters at once; use another optimizer"
        )
    ours, taken = {id(p) for _, p in given}, {id(p): tuple(p.shape) for group in groups for p in group["params"]}
    if foreign := [shape for key, shape in taken.items() if key not in ours]:
        raise LaunchError(
            f"{name} updates {len(foreign)} parameters that its factory was not given, the first of shape "
            f"{foreign[0]}: the ranks train others; make it from the factory's argument, lambda params: {name}(params)"
        )
    if isinstance(found, Exception) and not (type(optimizer) in ELEMENTWISE and len(groups) == 1):
        found = f"cannot be tried on small tensors, {type(found).__name__}: {found}"
    if isinstance(found, str):
        raise LaunchError(
            f"{name} {found}; use an optimizer that works element by element, or data_parallel, where each rank has "
            f"the whole model; worker(..., elementwise=True) skips this check"
        )
    if left := [name for name, p in given if p.requires_grad and id(p) not in taken]:
        warnings.warn(f"the optimizer leaves out {_few(left)}, which will not be trained", stacklevel=2)


def _few(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


# -- state -------------------------------------------------------------------------------------------------------------


def state_of(optimizers: Mapping[str, optim.Optimizer], parameter: nn.Parameter) -> MutableMapping[str, Any]:
    """The state of a parameter in its optimizer."""
    states = (each.state for each in optimizers.values())
    return next((state[parameter] for state in states if parameter in state), {})


def state_by_name(optimizer: optim.Optimizer, named: Named) -> dict[str, Any]:
    """The optimizer's state and options, with names in place of parameters."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in named}
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": {names[p]: dict(own) for p, own in optimizer.state.items()}, "param_groups": groups}


def load_by_name(
    optimizer: optim.Optimizer, named: Named, saved: Mapping[str, Any], kinds: Mapping[str, Mapping[str, Any]]
) -> None:
    """Load what `state_by_name` returned, bit for bit, where torch's load_state_dict may change dtypes.

    kinds: name -> key -> the kind of device that a tensor was on.
    """
    for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        set_options(group, options)
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()
    for name, parameter in named:
        for key, value in (state := dict(saved["state"].get(name, {}))).items():
            if isinstance(value, Tensor):
                was = kinds[name].get(key, "cpu")
                state[key] = value.to(device_of_state(groups[parameter], parameter, key, value.dim(), was))
        if name in saved["state"]:
            optimizer.state[parameter] = state


def set_options(group: MutableMapping[str, Any], options: Mapping[str, Any]) -> None:
    """Give a group these options; what is a tensor, such as a rate, on the device of the one that it replaces."""
    for key, value in options.items():
        if key != "params":
            both = isinstance(value, Tensor) and isinstance(group.get(key), Tensor)
            group[key] = value.to(group[key].device) if both else value


def device_of_state(
    group: Mapping[str, Any], parameter: nn.Parameter, key: str, dims: int, was: str = "cpu"
) -> torch.device:
    """Where an optimizer has a tensor of a parameter's state: beside it, but for counters that were on the CPU.

    dims: of the tensor.  was: the kind of device that it was on.
    """
    counts = dims == 0 and was == "cpu" and (parameter.dim() > 0 or key == "step")
    return torch.device("cpu") if counts and not (group.get("fused") or group.get("capturable")) else parameter.device


# -- trial -------------------------------------------------------------------------------------------------------------


def _try(factory: OptimizerFactory, whole: Whole, named: Named, divided: Sequence[str]) -> str | Exception | None:
    """What the update of an element reads besides its own gradients; the error where that cannot be found out.

    Small tensors of generic values are trained whole, in halves along each dim, and some of them without the others:
    an update that reads only its own element gives the same values each time.
    """
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    tried = range(0, len(trained), math.ceil(len(trained) / _TRIED))
    dims = [max(1, parameter.dim()) if name in divided else 0 for name, parameter in trained]
    data = cache(lambda k, step: _generic(trained[k][1], k, step))
    try:
        expected = _updated(factory, whole, trained, tried, data)
        for dim, half in product(range(max(dims)), (0, 1)):

            def part(k: int, tensor: Tensor, dim: int = dim, half: int = half) -> Tensor:
                return tensor.chunk(2, dim)[half] if dim < dims[k] else tensor

            got = _updated(factory, whole, trained, tried, data, part)
            if not all(torch.allclose(tensor, part(k, expected[k]), rtol=1e-6, atol=1e-9) for k, tensor in got.items()):
                return f"looks at whole tensors, and this rank has a part of {_few(divided)}"
        for some in (tried[::2], tried[1::2]):
            got = _updated(factory, whole, trained, some, data)
            if not all(torch.allclose(got[k], expected[k], rtol=1e-6, atol=1e-9) for k in some):
                return "looks at several tensors together, and this rank has some of the model's"
    except Exception as error:
        return error
    return None


def _updated(
    factory: OptimizerFactory,
    whole: Whole,
    named: Named,
    some: Iterable[int],
    data: Callable[[int, int], Tensor],
    part: Callable[[int, Tensor], Tensor] = lambda k, tensor: tensor,
) -> dict[int, Tensor]:
    """Small tensors, or parts of them, in place of the parameters, after steps in which `some` have gradients.

    data: the number of a parameter and of a step -> its gradient there; of step 0 its value.
    """
    values = [nn.Parameter(part(k, data(k, 0)).clone()) for k in range(len(named))]
    optimizer, _ = call(factory, whole, [(name, value) for (name, _), value in zip(named, values, strict=True)])
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    for step in range(2 if type(optimizer) in ELEMENTWISE and not hooks else _STEPS):
        for k in some:
            values[k].grad = part(k, data(k, step + 1)).clone()
        optimizer.step()
    return {k: values[k].detach() for k in some}


def _generic(parameter: Tensor, k: int, step: int) -> Tensor:
    """A small tensor of unlike values, with as many dims as a parameter and of its kind."""
    shape = [4, 6, *[2] * parameter.dim()][: max(1, parameter.dim())]
    numbers = torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64, device=parameter.device).reshape(shape)
    values = (numbers * (1.7 + 0.31 * k) + 2.3 * step).sin() * (1 + 0.1 * numbers)
    return torch.complex(values, values.flip(0)) if parameter.is_complex() else values
