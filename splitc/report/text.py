"""Write the report as text of at most 80 columns, for any length of names and number of layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from splitc import units
from splitc.ir.features import approximation
from splitc.ir.graph import info
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram, PlacedProgram
from splitc.ir.regions import OwnCode, names_in, regions
from splitc.ir.short_wire import wire_text
from splitc.report.blocks import Hidden, Row, collapse
from splitc.report.figures import ERROR, Figures, by_bytes, of_plan
from splitc.report.tables import WIDTH, by_ranks, rank_list, runs, short, table, wrap

MANY = 24  # layers; above this, repeated blocks are collapsed
REASONS = 16  # layers; above this, reasons are given for the largest layers only


def report(program: LoweredProgram, everything: bool = False, request: str = "") -> str:
    """Return the whole report.

    everything: show a row and a reason for every layer, repeated blocks too.  request: fingerprint of what was asked.
    """
    figures, told = Figures(program), of_plan(program.plan, program.name)
    layers = [figures.layer(layer) for layer in program.layers]
    rows = [(layer["name"], _cells(layer)) for layer in layers]
    whole = everything or len(rows) <= MANY
    folded = collapse(rows)
    shown: list[int | Hidden] = list(range(len(rows))) if whole else folded
    sections = [
        _headline(program, request),
        _placements(rows, shown),
        _ranks(program, figures),
        _candidates("the best plan of each strategy", told["candidates"]),
        _candidates("the best plan by the numbers on the wire", told.get("on_wire", ())),
        tried(program.plan),
        _reasons([layers[k] for k in (shown if everything else folded) if isinstance(k, int)], len(layers), everything),
    ]
    frozen, guessed = ", ".join(program.frozen_layers), ", ".join(by_bytes(program))
    notes = [
        f"Frozen layers, without gradients: {frozen}." * bool(frozen),
        f"Priced by bytes alone, since their FLOPs are unknown: {guessed}." * bool(guessed),
        *_own_code(program, layers),
        *program.notes,
        *(f"Traced for batches of {guard} ({guard.source})." for guard in program.guards),
        _norm_groups(program),
    ]
    return "\n\n".join(filter(None, (*sections, *map(wrap, notes)))) + "\n"


def _own_code(program: PlacedProgram, layers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Describe what stays the user's own code, its share of the model, and why; regions of one line together."""
    total = sum(each.numel for each in program.tensors.values() if each.parameter)
    flops = sum(layer["flops"] for layer in layers)
    by_line: dict[str, list[OwnCode]] = {}
    for _, own in regions(program):
        by_line.setdefault(own.why.partition(": ")[0], []).append(own)
    for group in by_line.values():
        paths = list(dict.fromkeys(own.path for own in group))
        held = {name for path in paths for name in names_in(program.root, path)}
        parameters = sum(t.numel for name, t in program.tensors.items() if t.parameter and name in held)
        inside = sum(layer["flops"] for layer in layers if layer["name"] in [path or "model" for path in paths])
        listed = ", ".join(path or "the whole model" for path in paths[:4])
        more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
        random = sorted({name for own in group for name in own.random})
        flattened = any(draw.rows > 1 for own in group for draw in own.draws)
        yield (
            f"The user's own code, since it cannot be traced: {listed}{more}, with {parameters / total:.1%} of the "
            f"parameters and {inside / max(flops, 1):.1%} of the FLOPs (backward and memory are estimated). "
            f"{group[0].why}."
            + (f" Each rank draws its own numbers from {', '.join(random)}." if random else "")
            + (" Random numbers inside take the rows of an example to lie together." if flattened else "")
        )


def _headline(program: PlacedProgram, request: str) -> str:
    plan, prediction = program.plan, program.plan.prediction
    gap = f"{prediction.gap:.1%}"
    proof = {"optimal": "proved optimal", "gap": f"within {gap} of the optimum"}.get(
        prediction.proof, f"not proved optimal, at most {gap} from it" if prediction.gap else "not proved optimal"
    )
    empty = plan.roles.keys() - {place.role for place in plan.placements.values()}
    busy = {rank for role, ranks in plan.all_roles.items() if role not in empty for rank in ranks}
    shown = {role: ranks for role, ranks in plan.all_roles.items() if role not in empty or not busy.issuperset(ranks)}
    roles = ", ".join(f"{role}{' (no layers)' * (role in empty)} on {rank_list(shown[role])}" for role in shown)
    parameters = sum(h.numel for h in program.tensors.values() if h.parameter)
    cluster, asked = f" of {prediction.cluster}" * bool(prediction.cluster), f"; request {request}" * bool(request)
    lines = [
        f"{program.name} on {units.numbered(plan.world, 'rank')}{cluster}: {plan.strategy} "
        f"({'' if plan.exact else 'approximate, '}{proof})",
        f"{roles}; a step of {units.numbered(plan.global_batch, 'example')} {_price(plan)}; "
        f"{units.count(parameters)} parameters in {units.numbered(len(program.layers), 'layer')}{asked}",
    ]
    lines += [prediction.advice] * bool(prediction.advice)
    how = approximation(plan)
    lines += [f"approximate: {how}; seconds and bytes are means over a {plan.cycle}"] * bool(how)
    short = wire_text(plan.wire)
    lines += [f"approximate: {short} on the wire, summed in float32"] * bool(short)
    shares = ", ".join(map(str, plan.sum_shares))
    lines += [f"gradients are summed by shares {shares} of the ranks, whose lines differ"] * bool(shares)
    lines += [f"an update every {plan.accumulate} batches; seconds and bytes are their means"] * (plan.accumulate > 1)
    return "\n".join(map(wrap, lines))


def _price(plan: Plan) -> str:
    """Return the simulated step time and what it follows from."""
    if not plan.step_seconds:
        return "has no price, since the plan was written or edited by hand: --cluster gives it one"
    rate = f"{plan.samples_per_second:,.0f} samples/s"
    p90 = plan.prediction.p90
    own = f"; 9 of 10 steps take at most {units.seconds(p90)}" if p90 else ""
    told = plan.prediction
    basis = f", measured here: {units.seconds(told.ran)}" if told.ran else f", {told.basis}" * bool(told.basis)
    return f"takes {units.seconds(plan.step_seconds)}, {rate} (predicted by simulation{basis}{own})"


# -- tables ------------------------------------------------------------------------------------------------------------


def _placements(rows: Sequence[Row], shown: Sequence[int | Hidden]) -> str:
    headers = "layer|#params|#FLOPs|#FLOP/B|role|sync|#sent|#compute"
    visible = [rows[each] for each in shown if isinstance(each, int)]
    lines = table(headers, [[name, *cells] for name, cells in visible]).splitlines()
    following = iter(lines[2:])
    text = [*lines[:2], *(next(following) if isinstance(each, int) else _middle(f"  {each}") for each in shown)]
    if hidden := sum(each.rows for each in shown if isinstance(each, Hidden)):
        text.append(wrap(f"{hidden} of {len(rows)} layers are hidden, since their rows repeat; --all shows them"))
    if parts := dict.fromkeys(part for _, cells in visible if re.match(r"1/\d", part := cells[4].partition(" ")[0])):
        text.append(wrap(f"{', '.join(parts)}: each rank of a group holds that part of the layer"))
    return "\n".join(text)


def _cells(layer: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        units.count(layer["parameters"]),
        units.count(layer["flops"]),
        "" if layer["ccr"] is None else units.count(layer["ccr"]),
        short(layer["role"], 8),
        held(layer),
        units.nbytes(layer["sent_bytes"]) if layer["sent_bytes"] else "",
        units.seconds(layer["seconds"]) if layer["seconds"] else "",
    )


def held(layer: Mapping[str, Any]) -> str:
    """Format the gradient sync, after the shard of a sharded layer: `all_reduce`, `1/2 all_reduce`; or its holding."""
    if layer["holding"] != "sharded":
        return str(layer["sync"] if layer["holding"] == "replicated" else layer["holding"])
    return f"1/{layer['group']}" + ("" if layer["sync"] == "none" else f" {layer['sync']}")


def _ranks(program: PlacedProgram, figures: Figures) -> str:
    rows = []
    for rank in range(program.plan.world):
        one = figures.rank(rank)
        sizes = [units.nbytes(one[k]) for k in ("parameter_bytes", "memory_bytes", "sent_bytes", "received_bytes")]
        sizes[2] += f" in {one['messages']:.4g}"
        rows.append((rank, [one["role"] or "idle", *sizes]))
    shown = [[short(ranks, 24), *cells] for ranks, *cells in by_ranks(rows)]
    text = table("|role|#params|#memory|#sends/step|#receives", shown, elastic=1)
    return "\n".join([text, *map(wrap, _slow(figures))])


def _slow(figures: Figures) -> Iterator[str]:
    """Say how uneven computing is and which layers make the slowest rank slow, and how much of transfers is latency."""
    if (busiest := figures.busiest()) is not None:
        layers = ", ".join(f"{each['name']} {units.seconds(each['seconds'])}" for each in busiest["layers"])
        took = f"{units.seconds(busiest['seconds'])}, {busiest['imbalance']:.2f} times the mean"
        share = "" if figures.latency is None else f"; {figures.latency:.0%} of the time of transfers is latency"
        yield f"rank {busiest['rank']} computes longest, {took}: {layers}{share}"


def _candidates(title: str, candidates: Sequence[Mapping[str, Any]]) -> str:
    if not candidates:
        return ""
    ordered = best_first(candidates)
    best = ordered[0]["samples_per_second"] if ordered[0]["feasible"] else 0.0
    rows = []
    for each in ordered:
        of_best = f"{each['samples_per_second'] / best:.2f}x" if best and each["feasible"] else ""
        ranks, *prices = priced(each)
        rows.append([_name(each), ranks if each["feasible"] else "not possible", *prices, of_best])
    text = table("strategy|ranks|#batch|#step|#samples/s|#of best", rows, elastic=1, least=6)
    equal = [_name(c) for c in ordered if c["feasible"] and c["samples_per_second"] >= (1 - ERROR) * best]
    others = ", ".join(equal[1:])
    notes = [f"within the error of prediction ({ERROR:.0%}) of {equal[0]}: {others}"] if others else []
    notes += [f"{each['strategy']}: {each['why']}" for each in ordered if each["why"]]
    return "\n".join([title, text, *(wrap(note, "  ") for note in notes)])


def best_first(candidates: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sort candidates by samples/s; those without a plan are last."""
    return sorted(candidates, key=lambda each: (not each["feasible"], -each["samples_per_second"]))


def priced(each: Mapping[str, Any], examples: str = "") -> list[str]:
    """Format the ranks, examples, step and samples/s of a candidate.  examples: their format."""
    ranks = ", ".join(f"{number} {role}" for role, number in each["roles"].items())
    if not each["feasible"]:
        return [ranks, "", "", ""]
    rate = f"{each['samples_per_second']:,.0f}"
    return [ranks, format(each["global_batch"], examples), units.seconds(each["step_seconds"]), rate]


def with_microbatches(each: Mapping[str, Any]) -> str:
    """Format a candidate's strategy: `data_parallel, 4 microbatches`."""
    parts = f", {each['microbatches']} microbatches" if each["microbatches"] > 1 else ""
    return f"{each['strategy']}{parts}"


def _name(each: Mapping[str, Any]) -> str:
    return with_microbatches(each) + " (approximate)" * (not each["exact"])


def tried(plan: Plan) -> str:
    """The plans that tuning ran, the fastest first; empty where none did."""
    ran = [each for each in plan.prediction.tried if each.measured and not each.failed]
    ran.sort(key=lambda each: each.measured / each.global_batch)
    rows = []
    for each in ran:
        rate, best = each.global_batch / each.measured, ran[0].global_batch / ran[0].measured
        figures = f"{units.seconds(each.measured)} ± {each.spread:.1%}", f"{rate:,.0f}", f"{rate / best:.2f}"
        rows.append([f"{each.name}{' *' * (each.plan == plan.hash)}", units.seconds(each.predicted), *figures])
    notes = [wrap(f"{each.name} is out: {each.failed}", "  ") for each in plan.prediction.tried if each.failed]
    return "\n".join([table("measured here|#predicted|#measured|#samples/s|#of best", rows), *notes]) if rows else ""


# -- words -------------------------------------------------------------------------------------------------------------


def _reasons(layers: Sequence[Mapping[str, Any]], number: int, everything: bool) -> str:
    """Format the reasons of the placements.  number: layers of the model, hidden ones included."""
    chosen = [layer for layer in layers if layer["why"]]
    if not everything and len(chosen) > REASONS:
        chosen = _heaviest(chosen, REASONS)
    if not chosen:
        return ""
    lines = [wrap(f"{layer['name']} {layer['why']}", "  ") for layer in chosen]
    if len(chosen) < number:
        left = number - len(chosen)
        lines.append(wrap(f"{left} of {number} layers, repeated or small, are left out; --all shows them", "  "))
    return "\n".join(["why", *lines])


def _heaviest(layers: Sequence[Mapping[str, Any]], number: int) -> list[Mapping[str, Any]]:
    """Return the `number` layers with the largest share of parameters and FLOPs, in model order."""
    parameters = sum(layer["parameters"] for layer in layers) or 1
    flops = sum(layer["flops"] for layer in layers) or 1
    weight = [layer["parameters"] / parameters + layer["flops"] / flops for layer in layers]
    return [layers[k] for k in sorted(sorted(range(len(layers)), key=lambda k: -weight[k])[:number])]


def _norm_groups(program: PlacedProgram) -> str:
    plan = program.plan
    sizes: dict[str, tuple[int, ...]] = {}
    for node in program.graph.nodes:
        if node.op == "call_module" and "BatchNorm" in type(program.root.get_submodule(str(node.target))).__name__:
            role = plan.placements[info(node).layer].role
            sizes[role] = tuple(size for rank in plan.roles[role] for size in plan.own_sizes(role, rank))
    if not any(len(groups) > 1 for groups in sizes.values()):
        return ""
    listed = "; ".join(f"{role}: {runs(groups)} examples" for role, groups in sizes.items())
    what = "microbatches" if plan.in_pieces else "batch, as under DDP"
    return f"BatchNorm normalises over each rank's own {what} ({listed})."


def _middle(text: str) -> str:
    """Shorten text that is too long for a line by cutting its middle."""
    return text if len(text) <= WIDTH else f"{text[:30]}...{text[-(WIDTH - 33) :]}"
