"""Write bags of one size, which offsets divide, as rows of a matrix.

y = F.embedding_bag(x, weight, arange(0, 4 * n, 4))     ->     y = F.embedding_bag(x.reshape(-1, 4), weight)

Offsets count from the first row of a batch, of which each rank has a part; a row of a matrix is an example's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from splitc.capture.refusals import Unsupported
from splitc.capture.trace.calls import Call
from splitc.capture.trace.constants import Constants, NotConstant
from splitc.capture.trace.proxy import is_proxy
from splitc.runtime.bags import ONE_SIZE


def with_rows(call: Call, constants: Constants, record: Callable[..., Any]) -> Call:
    """The call with bags of one size as rows; any other call, and bags of other sizes that no data change, as it is.

    record: makes a node.  Raises Unsupported for offsets that follow from the data.
    """
    if call.target is not F.embedding_bag:
        return call
    bound = inspect.signature(F.embedding_bag).bind(*call.args, **call.kwargs)
    given, defaults = dict[str, Any](bound.arguments), bound.signature.parameters
    has_end = bool(given.pop("include_last_offset", False))
    if (offsets := given.pop("offsets", None)) is None:
        return call
    try:
        found = [constants.value(offsets._node, probe) for probe in (0, 1)]
    except NotConstant:
        raise Unsupported(f"offsets divide what is read here into bags by the data. {ONE_SIZE}", stays=True) from None
    totals = [len(value) for value in given["input"]._values]
    size = totals[1] - totals[0]
    for each, total in zip(found, totals, strict=True):
        if not size or total % size or not torch.equal(each, torch.arange(0, total + has_end, size).to(each)):
            return call
    for name in ("input", "per_sample_weights"):
        if given.get(name) is not None:
            given[name] = record("call_method", "reshape", (given[name], -1, size), {})
    args = given.pop("input"), given.pop("weight")
    return Call(call.op, call.target, args, {n: v for n, v in given.items() if is_proxy(v) or v != defaults[n].default})
