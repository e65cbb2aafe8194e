"""The placement report: which layer runs where, why, and what every family of plans would cost.  Fits 80 columns."""

from __future__ import annotations

import textwrap
from typing import Any

import tabulate as tables

from splitc import units
from splitc.plan import Plan
from splitc.program import Layer, Program
from splitc.wire import wire

_WIDTH = 80
tables.MIN_PADDING = 0  # columns as narrow as their text


def report(program: Program) -> str:
    """The whole report as text."""
    plan = program.required_plan
    parts = [_headline(program), _placements(program), _ranks(program), _candidates(plan), _reasons(program)]
    if program.frozen_layers:
        parts.append(_wrap(f"Frozen, so without gradients: {', '.join(program.frozen_layers)}."))
    if (norms := _norm_groups(program)) is not None:
        parts.append(norms)
    return "\n\n".join(parts) + "\n"


def as_json(program: Program) -> dict[str, Any]:
    """The report as data, `schema` 1: the busiest rank's figures of one step, SI units, two FLOPs a multiply-add."""
    plan = program.required_plan
    return {
        "schema": 1,
        "model": program.name,
        "world": plan.world,
        "cluster": plan.cluster,
        "strategy": plan.strategy,
        "proof": plan.proof,
        "gap": plan.gap,
        "global_batch": plan.global_batch,
        "step_seconds": plan.step_seconds,
        "samples_per_second": plan.samples_per_second,
        "roles": {role: list(ranks) for role, ranks in plan.roles.items()},
        "layers": [_layer(program, layer) for layer in program.layers],
        "ranks": [_rank(program, rank) for rank in range(plan.world)],
        "candidates": [
            {
                "strategy": c.strategy,
                "step_seconds": c.step_seconds,
                "samples_per_second": c.samples_per_second,
                "global_batch": c.global_batch,
                "exact": c.exact,
                "feasible": c.feasible,
                "why": c.why,
            }
            for c in plan.candidates
        ],
    }


def _layer(program: Program, layer: Layer) -> dict[str, Any]:
    plan = program.required_plan
    place = plan.placements[layer.name]
    assert place.role is not None
    ranks = plan.roles[place.role]
    cost = program.costs[layer.name].at(plan.largest_batch(place.role))
    held = [program.holdings[h] for h in layer.holdings if program.holdings[h].parameter]
    gradient = sum(h.nbytes for h in held if h.trainable)
    ring = _ring(gradient, plan.world)
    return {
        "name": layer.name,
        "source": layer.source,
        "role": place.role,
        "holding": place.holding,
        "sync": place.sync,
        "parameters": sum(h.numel for h in held),
        "flops": cost.flops,
        "ccr": cost.flops / ring if ring else None,
        "sent_bytes": int(_ring(gradient, len(ranks)) + _crossing(program, layer)),
        "seconds": plan.seconds.get(layer.name, 0.0),
    }


def _ring(nbytes: float, ranks: int) -> float:
    """Bytes that one rank sends for a ring all-reduce."""
    return 2 * (ranks - 1) / ranks * nbytes


def _crossing(program: Program, layer: Layer) -> float:
    """Bytes that the busiest rank of the layer sends of values made in it."""
    plan = program.required_plan
    total = 0.0
    for stage in program.stages:
        batch = plan.largest_batch(stage.role)
        total += sum(cut.spec.nbytes(batch) for cut in stage.sends if cut.value in layer.nodes)
    return total


def _rank(program: Program, rank: int) -> dict[str, Any]:
    plan = program.required_plan
    role = next((role for role, ranks in plan.roles.items() if rank in ranks), None)
    sent = sum(op.sent for op in wire(program, rank))
    received = sum(
        op.sent
        for other in range(plan.world)
        for op in wire(program, other)
        if op.kind == "send" and op.ranks == (rank,)
    )
    received += sum(op.sent for op in wire(program, rank) if op.kind == "collective")  # a ring receives what it sends
    if role is None:
        return {
            "rank": rank,
            "role": None,
            "parameter_bytes": 0,
            "memory_bytes": 0,
            "sent_bytes": int(sent),
            "received_bytes": int(received),
        }
    stage = program.stage(role)
    held = [program.holdings[h] for h in stage.holdings if program.holdings[h].parameter]
    parameters = sum(h.nbytes for h in held)
    gradients = sum(h.nbytes for h in held if h.trainable)
    kept = sum(program.costs[layer].at(plan.batch(rank)).kept for layer in stage.layers)
    return {
        "rank": rank,
        "role": role,
        "parameter_bytes": parameters,
        "memory_bytes": int(parameters + 2 * gradients + kept + (gradients if len(plan.roles[role]) > 1 else 0)),
        "sent_bytes": int(sent),
        "received_bytes": int(received),
    }


# -- text --------------------------------------------------------------------------------------------------------------


def _headline(program: Program) -> str:
    plan = program.required_plan
    proof = {"optimal": "proved optimal", "gap": f"within {plan.gap:.1%} of the optimum"}.get(
        plan.proof, "not proved optimal"
    )
    roles = ", ".join(f"{role} on {rank_list(ranks)}" for role, ranks in plan.roles.items())
    return "\n".join(
        [
            f"{program.name} on {plan.world} ranks of {plan.cluster}: {plan.strategy} ({proof})",
            _wrap(
                f"{roles}; a step of {plan.global_batch} examples takes {units.seconds(plan.step_seconds)}, "
                f"{plan.samples_per_second:,.0f} samples/s (predicted)"
            ),
        ]
    )


def rank_list(ranks: tuple[int, ...]) -> str:
    """`(0, 1, 2)` -> `ranks 0-2`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + " ".join(map(str, ranks))


def _placements(program: Program) -> str:
    rows = []
    for layer in (_layer(program, one) for one in program.layers):
        ccr = "" if layer["ccr"] is None else units.count(layer["ccr"])
        sent = units.nbytes(layer["sent_bytes"]) if layer["sent_bytes"] else ""
        rows.append(
            [
                _short(layer["name"], 20),
                units.count(layer["parameters"]),
                units.count(layer["flops"]),
                ccr,
                layer["role"],
                layer["sync"],
                sent,
                units.seconds(layer["seconds"]),
            ]
        )
    headers = ["layer", "params", "FLOPs", "FLOP/B", "role", "sync", "sent", "compute"]
    return tables.tabulate(
        rows,
        headers,
        disable_numparse=True,
        colalign=("left", "right", "right", "right", "left", "left", "right", "right"),
    )


def _ranks(program: Program) -> str:
    plan = program.required_plan
    rows: list[list[str]] = []
    seen: dict[tuple[Any, ...], list[int]] = {}
    for rank in range(plan.world):
        figures = _rank(program, rank)
        key = (
            figures["role"] or "idle",
            *(units.nbytes(figures[k]) for k in ("parameter_bytes", "memory_bytes", "sent_bytes", "received_bytes")),
        )
        seen.setdefault(key, []).append(rank)
    for key, ranks in seen.items():
        rows.append([rank_list(tuple(ranks)), *key])
    return tables.tabulate(
        rows,
        ["", "role", "parameters", "memory", "sends/step", "receives/step"],
        disable_numparse=True,
        colalign=("left", "left", "right", "right", "right", "right"),
    )


def _candidates(plan: Plan) -> str:
    fastest = max((c.samples_per_second for c in plan.candidates if c.feasible), default=0.0)
    rows = []
    for c in sorted(plan.candidates, key=lambda c: -c.samples_per_second if c.feasible else 1):
        split = ", ".join(f"{len(ranks)} {role}" for role, ranks in c.roles.items())
        if c.feasible:
            rows.append(
                [
                    c.strategy,
                    split,
                    str(c.global_batch),
                    units.seconds(c.step_seconds),
                    f"{c.samples_per_second:,.0f}",
                    f"{c.samples_per_second / fastest:.2f}x" if fastest else "",
                ]
            )
        else:
            rows.append([c.strategy, "", "", "", "does not fit", ""])
    text = tables.tabulate(
        rows,
        ["best of each strategy", "ranks", "batch", "step", "samples/s", "of best"],
        disable_numparse=True,
        colalign=("left", "left", "right", "right", "right", "right"),
    )
    notes = [_wrap(f"{c.strategy}: {c.why}") for c in plan.candidates if not c.feasible and c.why]
    return "\n".join([text, *notes])


def _reasons(program: Program) -> str:
    reasons = program.required_plan.reasons
    return "\n".join(
        [
            "why",
            *(
                _wrap(f"{layer.name} {reasons[layer.name]}", "  ")
                for layer in program.layers
                if reasons.get(layer.name)
            ),
        ]
    )


def _norm_groups(program: Program) -> str | None:
    plan = program.required_plan
    sizes: dict[str, tuple[int, ...]] = {}
    for node in program.graph.nodes:
        if node.op == "call_module" and "BatchNorm" in type(program.root.get_submodule(str(node.target))).__name__:
            role = plan.placements[node.meta["layer"]].role
            assert role is not None
            sizes[role] = tuple(plan.batch(rank) for rank in plan.roles[role])
    if not any(len(groups) > 1 for groups in sizes.values()):
        return None
    listed = "; ".join(f"{role}: {', '.join(map(str, groups))} examples" for role, groups in sizes.items())
    return _wrap(f"BatchNorm normalises over what one rank runs, as under DDP ({listed}).")


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + ("  " if indent else ""))


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else "..." + name[-(width - 3) :]
