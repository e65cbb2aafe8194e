"""The slices of tensors whose neurons are dealt to ranks in each round, and what their exchange sends (IST, appendix).

Every rank owns 1/n of each dealt tensor, whatever it is dealt.  So a rank is expected to own 1/n of its own slice, and
of every other one: with P_r the bytes of rank r's slices

    deal, fetch_ahead   sum_{s != r} P_s / n     r sends every other rank what it owns of that one's slice (sent by r)
    collect             (1 - 1/n) P_r            and returns its own slice

Of a weight between neurons of two layers 1 - 1/n of a slice was trained by no rank in the round before: that part is
fetched ahead, while that round runs.

The optimizer's state of a slice travels with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from splitc.ir.layers import StateTensor
from splitc.ir.program import LoweredProgram, Stage
from splitc.ir.schedule.actions import Action
from splitc.ir.shares import share_out
from splitc.ir.transitions import Collective
from splitc.ir.wire_op import STATE_COPIES, Payload, What, WireOp
from splitc.runtime.spec import DealtDims, Neurons


def slice_numel(tensor: StateTensor, dims: DealtDims, ranks: int, rank: int = 0) -> int:
    """Return the elements of a dealt tensor that a rank has in a round; the first rank has the most."""
    numel = tensor.numel
    for dim, runs in dims.items():
        bounds = [share_out(width, ranks) if layer else (0,) * rank + (0, width) for layer, width in runs]
        numel = numel // max(tensor.shape[dim], 1) * sum(each[rank + 1] - each[rank] for each in bounds)
    return numel


def share_of(tensors: Iterable[StateTensor], dealt: Mapping[str, DealtDims], ranks: int, rank: int = 0) -> float:
    """Return the share of a layer with these tensors that a rank computes: 1 / n of its weights, or 1 / n^2."""
    held = [(slice_numel(each, dealt.get(each.name, {}), ranks, rank), each.numel) for each in tensors]
    return sum(own for own, _ in held) / max(sum(whole for _, whole in held), 1) if held else 1.0


def fetches_ahead(stage: Stage) -> bool:
    """Return whether some of what is dealt is trained by no rank in a round: weights between neurons of two ranks."""
    return any(len(dims) > 1 for dims in stage.dealt.values())


def exchanged_nbytes(tensor: StateTensor, dims: DealtDims, ranks: int, rank: int = 0, verb: str = "collect") -> float:
    """Return the bytes of a rank's slice of a dealt tensor that travel to it, and back; none of a buffer do."""
    copies = (1 + STATE_COPIES * tensor.trainable) * tensor.parameter
    idle = (1 - 1 / ranks) * prod(_dealt_part(runs) for runs in dims.values()) if len(dims) > 1 else 0.0
    part = {"collect": 1.0, "deal": 1 - idle, "fetch_ahead": idle}[verb]
    return slice_numel(tensor, dims, ranks, rank) * copies * tensor.dtype.itemsize * part


def _dealt_part(runs: Sequence[Neurons]) -> float:
    """The part of a dim that is dealt."""
    return sum(run.width for run in runs if run.layer) / max(sum(run.width for run in runs), 1)


def dealt_ops(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield the all-to-all of the slices of all dealt tensors, one for each dtype, before or after a round."""
    ranks, stage = tuple(range(program.plan.world)), program.stage(action.role)
    tensors = [program.tensors[name] for name in stage.dealt]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors if tensor.parameter):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        count, verb = len(ranks), action.verb
        sizes = [sum(exchanged_nbytes(t, stage.dealt[t.name], count, other, verb) for t in alike) for other in ranks]
        sent = (sum(sizes) - sizes[rank] if verb != "collect" else (count - 1) * sizes[rank]) / count
        shape, payload = (round(sum(sizes) / dtype.itemsize),), Payload(What(action.verb), str(dtype), stage.role)
        yield WireOp("collective", payload, ranks, shape, dtype, sent, None, Collective.ALL_TO_ALL)
