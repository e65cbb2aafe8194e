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
from torch import Tensor


class Draw(Protocol):
    """The source of random numbers.  Each call is a draw of its own, numbered in the order of calls."""

    def dropout(self, value: Tensor, p: float, feature_dims: int) -> Tensor: ...

    def uniform(self, like: Tensor) -> Tensor: ...

    def normal(self, like: Tensor) -> Tensor: ...

    def write(self, old: Tensor, new: Tensor) -> Tensor: ...

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
    if form is None or not (isinstance(function, str) or _is_torchs(function, name)):
        return None
    draws = _DRAWS_IF.get(name)
    return None if draws is not None and not draws(*args, **kwargs) else form


def _is_torchs(function: Any, name: str) -> bool:
    return any(getattr(place, name, None) is function for place in (torch, F, torch.Tensor)) or isinstance(
        function,
        types.BuiltinFunctionType | types.MethodDescriptorType,  # where `torch.rand` itself is patched
    )


# -- dropout -----------------------------------------------------------------------------------------------------------


def _dropout(
    channels: int, draw: Draw, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if p == 0 or not training:
        return input
    new = draw.dropout(input, p, _feature_dims(channels, input.dim()))
    return draw.write(input, new) if inplace else new


def _alpha_dropout(
    channels: int, draw: Draw, input: Any, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Any:
    if p == 0 or not training:
        return input
    dropped = -1.0507009873554804934193349852946 * 1.6732632423543772848170429916717
    scale = 1 / math.sqrt((dropped**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    kept = draw.dropout(torch.ones_like(input), p, _feature_dims(channels, input.dim())) * (1 - p)
    new = (input * kept + dropped * (1 - kept)) * scale - scale * dropped * p
    return draw.write(input, new) if inplace else new


def _feature_dims(channels: int, dims: int) -> int:
    """The leading dims of the mask; 0: all.  channels: spatial dims, of which whole channels are dropped, or 0."""
    if not channels:
        return 0
    return 1 if channels != 2 and dims == channels + 1 else 2


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


def _attention_drops(*args: Any, **kwargs: Any) -> bool:
    return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))


def _heads_drop(*args: Any, **kwargs: Any) -> bool:
    return bool(args[10] if len(args) > 10 else kwargs.get("dropout_p", 0.0)) and kwargs.get("training", True) is True


# -- numbers -----------------------------------------------------------------------------------------------------------


def _new(make: str, draw: Draw, *size: Any, generator: Any = None, requires_grad: bool = False, **options: Any) -> Any:
    """`rand` and `randn`."""
    _require_common(generator, options)
    return _trained(getattr(draw, make)(torch.empty(*size, **options)), requires_grad)


def _like(make: str, draw: Draw, input: Any, requires_grad: bool = False, **options: Any) -> Any:
    return _trained(getattr(draw, make)(torch.empty_like(input, **options)), requires_grad)


def _trained(value: Any, requires_grad: bool) -> Any:
    return value.requires_grad_() if requires_grad else value


def _randint(draw: Draw, *args: Any, size: Any = None, generator: Any = None, dtype: Any = None, **options: Any) -> Any:
    """randint(low=0, high, size), each by position or by name."""
    low, high = (options.pop(name, None) for name in ("low", "high"))
    _require_common(generator, options)
    positional = list(args)
    size = positional.pop() if size is None else size
    like = torch.empty(size, **{**options, "dtype": torch.float64})
    return _integers(draw, like, positional, low, high).to(dtype or torch.int64)


def _randint_like(
    draw: Draw, input: Any, *bounds: int, low: Any = None, high: Any = None, dtype: Any = None, **options: Any
) -> Any:
    like = torch.empty_like(input, **{**options, "dtype": torch.float64})
    return _integers(draw, like, list(bounds), low, high).to(dtype or input.dtype)


def _integers(draw: Draw, like: Any, bounds: list[int], low: Any = None, high: Any = None) -> Any:
    """Whole numbers from `low` (by default 0) to `high` - 1; `bounds` are those given by position."""
    high = bounds.pop() if high is None else high
    low = low or (bounds.pop() if bounds else 0)
    if high - low > 2**32:
        raise Unseeded("more than 2^32 whole numbers")
    return (draw.uniform(like) * (high - low)).floor() + low


def _bernoulli(draw: Draw, input: Any, p: float | None = None, *, generator: Any = None) -> Any:
    """torch.bernoulli(probabilities), or a probability and the shape of a tensor."""
    _require_common(generator)
    return (draw.uniform(input) < (input if p is None else p)).to(input.dtype)


def _bernoulli_(draw: Draw, input: Any, p: Any = 0.5, *, generator: Any = None) -> Any:
    _require_common(generator)
    like = input if input.dtype.is_floating_point else torch.empty_like(input, dtype=torch.float32)
    return draw.write(input, (draw.uniform(like) < p).to(input.dtype))


def _normal(draw: Draw, mean: Any, std: Any = 1.0, size: Any = None, *, generator: Any = None, **options: Any) -> Any:
    """torch.normal(mean, std), of which one is a tensor or `size` is given."""
    _require_common(generator, options)
    like = torch.empty(size, **options) if size is not None else torch.empty_like(mean + 0 * std)
    return draw.normal(like) * std + mean


def _filled(make: str, formula: Callable[..., Any], draw: Draw, input: Any, *args: Any, **options: Any) -> Any:
    """A method that fills `input` by a formula of uniform or normal numbers."""
    _require_common(options.pop("generator", None))
    return draw.write(input, formula(getattr(draw, make)(input), *args, **options))


def _random_(draw: Draw, input: Any, *bounds: int, generator: Any = None) -> Any:
    _require_common(generator)
    if not bounds:
        raise Unseeded("random_ without bounds")
    like = torch.empty_like(input, dtype=torch.float64)
    return draw.write(input, _integers(draw, like, list(bounds)).to(input.dtype))


def _rrelu(
    draw: Draw, input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Any:
    slope = draw.uniform(input) * (upper - lower) + lower if training else (lower + upper) / 2
    new = torch.where(input >= 0, input, input * slope)
    return draw.write(input, new) if inplace else new


def _inside(function: Any, draw: Draw, *args: Any, **kwargs: Any) -> Any:
    return draw.inside(_undispatched(function), args, kwargs)


def _unseeded(name: str, draw: Draw, *args: Any, **kwargs: Any) -> Any:
    raise Unseeded(name)


def _require_common(generator: Any, options: Mapping[str, Any] | None = None) -> None:
    if generator is not None:
        raise Unseeded("a generator of its own")
    if options and options.get("out") is not None:
        raise Unseeded("a tensor given as out=")


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
    "dropout": partial(_dropout, 0),
    **{f"dropout{n}d": partial(_dropout, n) for n in (1, 2, 3)},
    "feature_dropout": partial(_dropout, 2),
    "alpha_dropout": partial(_alpha_dropout, 0),
    "feature_alpha_dropout": partial(_alpha_dropout, 2),
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": partial(_inside, F.multi_head_attention_forward),
    "gumbel_softmax": partial(_inside, F.gumbel_softmax),
    "rand": partial(_new, "uniform"),
    "randn": partial(_new, "normal"),
    "rand_like": partial(_like, "uniform"),
    "randn_like": partial(_like, "normal"),
    "randint": _randint,
    "randint_like": _randint_like,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_,
    "normal": _normal,
    "random_": _random_,
    "rrelu": _rrelu,
    "uniform_": partial(
        _filled,
        "uniform",
        lambda u, low=0.0, high=1.0, **kw: u * (kw.get("to", high) - kw.get("from", low)) + kw.get("from", low),
    ),
    "normal_": partial(_filled, "normal", lambda z, mean=0.0, std=1.0: z * std + mean),
    "log_normal_": partial(_filled, "normal", lambda z, mean=1.0, std=2.0: (z * std + mean).exp()),
    "exponential_": partial(
        _filled, "uniform", lambda u, lambd=1.0: (u.neg().log1p().neg() / lambd).clamp_min(2.0**-25)
    ),
    "cauchy_": partial(
        _filled, "uniform", lambda u, median=0.0, sigma=1.0: ((u - 0.5) * math.pi).tan() * sigma + median
    ),
    "geometric_": partial(_filled, "uniform", lambda u, p: (u.neg().log1p() / math.log1p(-p)).floor() + 1),
    **{name: partial(_unseeded, name) for name in _UNSEEDED.split()},
}
_DRAWS_IF: dict[str, Callable[..., bool]] = {
    "scaled_dot_product_attention": _attention_drops,
    "multi_head_attention_forward": _heads_drop,
}
