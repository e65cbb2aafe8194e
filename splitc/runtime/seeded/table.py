"""The random functions of torch that are seeded by example, each in terms of three draws: dropout, uniform, normal.

A trace records the draws as nodes (`capture`), eager code computes them (`SeededRandom`), so both draw in the same
order.  A tensor that numbers are written into keeps its identity: `x.uniform_()` is `draw.write(x, ...)`.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from . import recurrent


class Draw(Protocol):
    """The source of random numbers.  Each call of the first three is a draw, numbered in the order of calls."""

    def dropout(self, value: Any, p: float, feature_dims: int) -> Any: ...

    def uniform(self, like: Any) -> Any: ...

    def normal(self, like: Any) -> Any: ...

    def write(self, old: Any, new: Any) -> Any: ...

    def inside(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call Python that draws."""
        ...


class Unseeded(Exception):
    """This call draws numbers that cannot be defined by example."""


Form = Callable[..., Any]


def form_of(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Form | None:
    """What computes the call from a `Draw` and its arguments; None for a call that draws nothing.

    function: of torch, or the name of a tensor method.
    """
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    form = _FORMS.get(name)
    if form is None or not (isinstance(function, _OF_TORCH) or getattr(F, name, None) is function):
        return None
    if name in recurrent.NAMES:
        return form if recurrent.rate(args) else None
    if name not in _RATE_AT:
        return form
    at = _RATE_AT[name]
    rate = args[at] if len(args) > at else kwargs.get("dropout_p", 0.0)
    return form if rate and kwargs.get("training", True) else None


_OF_TORCH = (str, types.BuiltinFunctionType, types.MethodDescriptorType)
_RATE_AT = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
_SELU = 1.0507009873554804934193349852946 * 1.6732632423543772848170429916717


def _dropout(
    channels: int,
    alpha: bool,
    draw: Draw,
    input: Any,
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
    train: bool = True,
) -> Any:
    """channels: spatial dims of a batched input, whose channels are dropped, or 0.  alpha: it keeps the moments."""
    if p == 0 or not train or not (training if training is not None else not alpha):
        return input
    feature_dims = 0 if not channels else 1 if channels != 2 and input.dim() != channels + 2 else 2
    if alpha:
        scale = 1 / math.sqrt((_SELU**2 * p + 1) * (1 - p)) if p < 1 else 0.0
        kept = draw.dropout(torch.ones_like(input), p, feature_dims) * (1 - p)
        new = (input * kept - _SELU * (1 - kept)) * scale + scale * _SELU * p
    else:
        new = draw.dropout(input, p, feature_dims)
    return draw.write(input, new) if inplace else new


def _attention(
    draw: Draw,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return draw.dropout(F.softmax(scores, dim=-1), dropout_p, 0) @ value


def _new(make: str, draw: Draw, *size: Any, **options: Any) -> Any:
    """`rand` and `randn`."""
    return getattr(draw, make)(torch.empty(*size, **_common(options)))


def _like(make: str, draw: Draw, input: Any, **options: Any) -> Any:
    return getattr(draw, make)(torch.empty_like(input, **options))


def _randint(draw: Draw, *given: Any, size: Any = None, dtype: Any = None, **options: Any) -> Any:
    """randint(low=0, high, size), each by position or by name."""
    bounds = [*given, *(options.pop(name) for name in ("low", "high") if name in options)]
    size = bounds.pop(len(given) - 1) if size is None else size
    like = torch.empty(size, **_common(options), dtype=torch.float64)
    return _integers(draw, like, *bounds).to(dtype or torch.int64)


def _randint_like(draw: Draw, input: Any, *bounds: int, dtype: Any = None, **options: Any) -> Any:
    named = [options.pop(name) for name in ("low", "high", "from", "to") if name in options]
    like = torch.empty_like(input, **options, dtype=torch.float64)
    return _integers(draw, like, *bounds, *named).to(dtype or input.dtype)


def _random_(draw: Draw, input: Any, *bounds: int, **options: Any) -> Any:
    return draw.write(input, _randint_like(draw, input, *bounds, **_common(options)))


def _integers(draw: Draw, like: Any, *bounds: int) -> Any:
    """Whole numbers from `bounds[-2]`, or 0, to `bounds[-1]` - 1."""
    low, high = (0, *bounds)[-2:] if bounds else (0, 2**33)
    if high - low > 2**32:
        raise Unseeded("more than 2^32 whole numbers")
    return (draw.uniform(like) * (high - low)).floor() + low


def _bernoulli(draw: Draw, input: Any, p: float | None = None, **options: Any) -> Any:
    """torch.bernoulli(probabilities), or a probability and the shape of a tensor."""
    _common(options)
    return (draw.uniform(input) < (input if p is None else p)).to(input.dtype)


def _bernoulli_(draw: Draw, input: Any, p: Any = 0.5, **options: Any) -> Any:
    _common(options)
    like = input if input.dtype.is_floating_point else torch.empty_like(input, dtype=torch.float32)
    return draw.write(input, (draw.uniform(like) < p).to(input.dtype))


def _normal(draw: Draw, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Any:
    """torch.normal(mean, std), of which one is a tensor or `size` is given."""
    _common(options)
    like = torch.empty(size, **options) if size is not None else torch.empty_like(mean + 0 * std)
    return draw.normal(like) * std + mean


def _rrelu(
    draw: Draw, input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Any:
    slope = draw.uniform(input) * (upper - lower) + lower if training else (lower + upper) / 2
    new = torch.where(input >= 0, input, input * slope)
    return draw.write(input, new) if inplace else new


def _filled(make: str, formula: Callable[..., Any], draw: Draw, input: Any, *args: Any, **options: Any) -> Any:
    """A method that fills `input` by a formula of uniform or normal numbers."""
    return draw.write(input, formula(getattr(draw, make)(input), *args, **_common(options)))


def _between(uniform: Any, low: float = 0.0, high: float = 1.0, **named: float) -> Any:
    """`from` and `to` of `uniform_`, by position or by name."""
    low, high = named.get("from", low), named.get("to", high)
    return uniform * (high - low) + low


def _inside(function: Any, draw: Draw, *args: Any, **kwargs: Any) -> Any:
    return draw.inside(_undispatched(function), args, kwargs)


def _unseeded(name: str, draw: Draw, *args: Any, **kwargs: Any) -> Any:
    raise Unseeded(name)


def _common(options: dict[str, Any]) -> dict[str, Any]:
    """The options without `generator`.  Raises Unseeded for a generator, or a tensor to write into."""
    if options.pop("generator", None) is not None or options.get("out") is not None:
        raise Unseeded("a generator or an output of its own")
    return options


@cache
def _undispatched(function: Any) -> Any:
    """A copy of a function of torch.nn.functional whose Python runs even where its arguments have overrides."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**function.__globals__, **dict.fromkeys(names, lambda *args: False)}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_UNSEEDED = (
    "multinomial randperm poisson binomial native_dropout dropout_ feature_dropout_ alpha_dropout_ rrelu_ "
    "fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d "
    "fractional_max_pool3d_with_indices _standard_gamma _sample_dirichlet"
)

_FORMS: dict[str, Form] = {
    "dropout": partial(_dropout, 0, False),
    **{f"dropout{n}d": partial(_dropout, n, False) for n in (1, 2, 3)},
    "feature_dropout": partial(_dropout, 2, False),
    "alpha_dropout": partial(_dropout, 0, True),
    "feature_alpha_dropout": partial(_dropout, 2, True),
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": partial(_inside, F.multi_head_attention_forward),
    "gumbel_softmax": partial(_inside, F.gumbel_softmax),
    "rand": partial(_new, "uniform"),
    "randn": partial(_new, "normal"),
    "rand_like": partial(_like, "uniform"),
    "randn_like": partial(_like, "normal"),
    "randint": _randint,
    "randint_like": _randint_like,
    "random_": _random_,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_,
    "normal": _normal,
    "rrelu": _rrelu,
    "uniform_": partial(_filled, "uniform", _between),
    "normal_": partial(_filled, "normal", lambda z, mean=0.0, std=1.0: z * std + mean),
    "log_normal_": partial(_filled, "normal", lambda z, mean=1.0, std=2.0: (z * std + mean).exp()),
    "exponential_": partial(
        _filled, "uniform", lambda u, lambd=1.0: (u.neg().log1p().neg() / lambd).clamp_min(2.0**-25)
    ),
    "cauchy_": partial(
        _filled, "uniform", lambda u, median=0.0, sigma=1.0: ((u - 0.5) * math.pi).tan() * sigma + median
    ),
    "geometric_": partial(_filled, "uniform", lambda u, p: (u.neg().log1p() / math.log1p(-p)).floor() + 1),
    **{name: partial(recurrent.layer_by_layer, name) for name in recurrent.NAMES},
    **{name: partial(_unseeded, name) for name in _UNSEEDED.split()},
}
