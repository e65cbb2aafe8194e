"""The report: figures that agree with each other, 80 columns whatever the names, and blocks summed up."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.alexnet import alexnet
from splitc.compiled import CompiledProgram
from splitc.cost_models.clusters.named import load_cluster
from splitc.ir.prediction import Candidate
from splitc.ir.program import LoweredProgram
from splitc.report.blocks import Hidden, collapse
from splitc.report.figures import as_json
from splitc.report.tables import rank_list
from splitc.report.text import _headline, report
from splitc.runtime.transport.phases import Phases
from tests.support.compiled import CLUSTER, class_batch, compiled
from tests.support.every_strategy import planned


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_output_projection_of_the_block, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.feed_forward = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.attention_output_projection_of_the_block(x)))
        for layer in self.feed_forward:
            x = F.relu(layer(x))
        return x


class DeepNetworkWithAQuiteRemarkablyLongNameThatGoesOnAndOnForMoreThanEightyColumns(nn.Module):
    """27 layers: a stem, 5 equal blocks of five, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.encoder = nn.ModuleList([Block(8) for _ in range(5)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.encoder:
            x = block(x)
        return self.head(x)


@cache
def deep() -> LoweredProgram:
    """The plan's own price is its only one: others would be found when they are read."""
    x, y = class_batch((4, 6), classes=3)
    network = DeepNetworkWithAQuiteRemarkablyLongNameThatGoesOnAndOnForMoreThanEightyColumns()
    program = compiled(network, (x,), y, F.cross_entropy, 3, "data_parallel").program
    return replace(program, plan=replace(program.plan, prediction=replace(program.plan.prediction, all=None)))


@cache
def deep_report(everything: bool = False) -> str:
    return report(deep(), everything)


@cache
def separated() -> CompiledProgram:
    x, y = class_batch((4, 3, 96, 96), classes=1000)
    return compiled(alexnet(width=0.25), (x,), y, F.cross_entropy, 4, "layer_separation(n_c=3, n_f=1)")


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_27_layers_fit_80_columns_and_of_repeated_blocks_the_report_says_how_many_rows_it_hides() -> None:
    short, long = deep_report(), deep_report(everything=True)
    assert max(map(len, (*short.splitlines(), *long.splitlines()))) <= 80
    assert "  encoder.1 to encoder.4: as encoder.0, 20 rows hidden" in short
    assert "20 of 27 layers are hidden, since their rows repeat; --all shows them" in short
    assert len(re.findall("all_reduce", short)) == 7 and len(re.findall("all_reduce", long)) == 27
    assert "hidden" not in long
    short, long = (text.split("\nwhy\n")[1] for text in (short, long))
    assert short.count("parameters and is") == 7 and long.count("parameters and is") == 27
    assert "20 of 27 layers, repeated or small, are left out; --all shows them" in short


@pytest.mark.slow
def test_the_report_of_few_layers_shows_them_all() -> None:
    assert report(separated().program) == report(separated().program, everything=True)


@pytest.mark.slow
def test_the_prices_of_all_families_have_their_global_batch() -> None:
    table = report(separated().program).split("the best plan of each strategy\n")[1].split("\n\n")[0]
    rows = {line.split()[0]: line for line in table.splitlines()[2:]}
    assert re.search(r" 1 all +4 .* [\d.]+x$", rows["single_device"])
    assert re.search(r" 4 all +16 .* [\d.]+x$", rows["data_parallel"])
    assert re.search(r" 3 conv, 1 fc +12 .* [\d.]+x$", rows["layer_separation"])
    assert re.search(r" 2 worker, 2 server +8 .* [\d.]+x$", rows["parameter_server"])


@pytest.mark.slow
def test_the_headline_says_proof_or_gap() -> None:
    for proof, gap, text in [
        ("optimal", 0.0, "proved optimal"),
        ("gap", 0.03, "within 3.0% of the optimum"),
        ("heuristic", 0.0, "not proved"),
    ]:
        program = separated().program
        plan = replace(program.plan, prediction=replace(program.plan.prediction, proof=proof, gap=gap, all=None))
        assert f"({text}" in report(replace(program, plan=plan)).splitlines()[0], proof


def test_ranks_are_listed_by_runs() -> None:
    for ranks, text in [
        ([3], "rank 3"),
        ([0, 1, 2], "ranks 0-2"),
        ([0, 2, 3, 7], "ranks 0 2-3 7"),
        (list(range(0, 40, 2)), "ranks 0 2 4 6 +16"),
    ]:
        assert rank_list(ranks) == text


# -- blocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_candidates_within_the_error_of_prediction_are_called_equal() -> None:
    made = deep()
    mixed, data, server = (
        Candidate(name, 8 / rate, rate, 8, True, True, roles={"all": (0, 1, 2)}, microbatches=parts)
        for name, rate, parts in (("mixed", 100.0, 2), ("data_parallel", 91.0, 1), ("parameter_server", 89.0, 1))
    )
    prediction = replace(made.plan.prediction, priced=(server, data, mixed))
    text = report(replace(made, plan=replace(made.plan, prediction=prediction)))
    assert "within the error of prediction (10%) of mixed, 2 microbatches: data_parallel\n" in text


@pytest.mark.slow
def test_the_price_is_simulated_and_the_planners_own_is_in_the_json() -> None:
    made = deep()
    prediction = replace(made.plan.prediction, step_seconds=0.5, program_seconds=0.75)
    made = replace(made, plan=replace(made.plan, prediction=prediction))
    text = " ".join(report(made).split())
    assert "takes 500 ms" in text
    assert "(predicted by simulation, extrapolated)" in text and "750 ms" not in text
    assert (as_json(made)["step_seconds"], as_json(made)["program_seconds"]) == (0.5, 0.75)


def rows(*names: str, other: str = "") -> list[tuple[str, tuple[str, ...]]]:
    return [(name, ("other",) if name == other else ("same",)) for name in names]


def test_blocks_that_are_alike_become_one() -> None:
    names = [f"b.{block}.{layer}" for block in range(4) for layer in ("x", "y")]
    assert collapse(rows("stem", *names, "head")) == [0, 1, 2, Hidden("b", 1, 3, 6), 9]
    assert str(Hidden("b", 1, 3, 6)) == "b.1 to b.3: as b.0, 6 rows hidden"
    assert str(Hidden("", 1, 1, 2)) == "1: as 0, 2 rows hidden"


def test_a_block_that_differs_in_a_figure_or_in_a_name_is_shown() -> None:
    names = [f"b.{block}.{layer}" for block in range(3) for layer in ("x", "y")]
    assert 2 in collapse(rows(*names, other="b.1.x"))
    assert all(isinstance(part, int) for part in collapse(rows("b.0.x", "b.0.y", "b.1.x", "b.1.z")))


def test_every_row_is_shown_or_hidden_once_whatever_the_names() -> None:
    for names in (
        ["0", "1", "2", "3"],
        ["a.0", "a.0.0", "a.1", "a.1.0", "a.2", "a.2.0"],
        ["b.0.c.0", "b.0.c.1", "b.0.c.2", "b.1.c.0", "b.1.c.1", "b.1.c.2"],
        ["x.1.y", "x.3.y", "x.2.y", "x.10.y", "x.11.y", "x.12.y"],
    ):
        parts = collapse(rows(*names))
        assert sum(part.rows if isinstance(part, Hidden) else 1 for part in parts) == len(names)


@pytest.mark.slow
def test_a_role_without_layers_is_named_where_its_ranks_have_no_others() -> None:
    made = separated().program
    for conv, said in (
        ((0, 1, 2), "conv on ranks 0-2, fc on rank 3;"),
        ((1, 2), "fc on rank 3, tail (no layers) on rank 0;"),
    ):
        roles = {"conv": conv, "fc": (3,), "tail": (0,)}
        assert said in " ".join(_headline(replace(made, plan=replace(made.plan, roles=roles)), "").split())


@pytest.mark.slow
def test_reasons_of_blocks_that_are_alike_are_given_once_in_small_models_too() -> None:
    x, y = class_batch((4, 6), classes=3)
    network = nn.Sequential(nn.Linear(6, 8), *(Block(8) for _ in range(2)), nn.Linear(8, 3))
    text = report(compiled(network, (x,), y, F.cross_entropy, 3, "data_parallel").program)
    assert "hidden" not in text and text.split("\nwhy\n")[1].count("parameters and is") == 7
    assert "5 of 12 layers, repeated or small, are left out" in text


# -- data --------------------------------------------------------------------------------------------------------------


def test_the_json_has_the_keys_of_schema_1_and_no_number_that_is_not_one() -> None:
    pins = {"conv": "conv", "fc*": "fc"}
    data = as_json(planned(4, "layer_separation(n_c=3, n_f=1)", pins=pins).program)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["schema"] == 1 and data["roles"] == {"conv": [0, 1, 2], "fc": [3]}
    layer = {"name", "role", "holding", "sync", "parameters", "flops", "ccr", "sent_bytes", "seconds"}
    rank = {"rank", "parameter_bytes", "memory_bytes", "sent_bytes", "received_bytes"}
    candidate = {"strategy", "step_seconds", "samples_per_second", "global_batch", "exact", "feasible", "why"}
    for rows_, keys in ((data["layers"], layer), (data["ranks"], rank), (data["candidates"], candidate)):
        assert all(keys <= row.keys() for row in rows_)
    assert data["samples_per_second"] == pytest.approx(data["global_batch"] / data["step_seconds"])


def test_the_rank_that_computes_longest_is_told_with_its_slowest_layers_and_what_latency_takes() -> None:
    made = planned(3, "data_parallel").program
    ranks = tuple(Phases(rank, 0.01, compute, 0.0, 0.0, 0.0) for rank, compute in enumerate((0.002, 0.006, 0.004)))
    seconds = {layer.name: (k + 1) * 1e-4 for k, layer in enumerate(made.layers)}
    prediction = replace(
        made.plan.prediction, phases=ranks, layer_seconds=seconds, weights={"latency": (0.2, 0.0, 0.4)}
    )
    made = replace(made, plan=replace(made.plan, prediction=prediction))
    busiest = as_json(made)["busiest"]
    assert (busiest["rank"], busiest["seconds"], busiest["imbalance"]) == (1, 0.006, pytest.approx(1.5))
    assert [each["name"] for each in busiest["layers"]] == [layer.name for layer in made.layers][:-6:-1]
    assert as_json(made)["latency_share"] == 0.4
    text = " ".join(report(made).split())
    assert "rank 1 computes longest, 6 ms, 1.50 times the mean: fc8 400 us," in text
    assert "; 40% of the time of transfers is latency" in text
    messages = as_json(made)["ranks"][0]["messages"]
    assert messages > 0 and f" in {messages:.4g} " in text
    nothing = replace(prediction, phases=(), weights={})
    data = as_json(replace(made, plan=replace(made.plan, prediction=nothing)))
    assert data["busiest"] is None and data["latency_share"] is None


@pytest.mark.slow
def test_what_the_ranks_send_is_what_they_receive() -> None:
    ranks = as_json(separated().program)["ranks"]
    assert sum(r["sent_bytes"] for r in ranks) == pytest.approx(sum(r["received_bytes"] for r in ranks), abs=len(ranks))


@pytest.mark.slow
def test_a_rank_holds_its_roles_parameters_and_needs_more_memory_than_that() -> None:
    data = as_json(separated().program)
    for rank in data["ranks"]:
        own = sum(layer["parameters"] for layer in data["layers"] if layer["role"] == rank["role"])
        assert rank["parameter_bytes"] == 4 * own
        assert rank["memory_bytes"] > 3 * rank["parameter_bytes"]


@pytest.mark.slow
def test_a_rank_without_work_holds_nothing() -> None:
    x, y = class_batch((4, 6), classes=3)
    idle = as_json(compiled(nn.Linear(6, 3), (x,), y, F.cross_entropy, 2, "single_device").program)["ranks"][1]
    assert (idle["rank"], idle["role"], idle["parameter_bytes"], idle["memory_bytes"]) == (1, None, 0, 0)
    assert idle["sent_bytes"] <= 8  # the loss, which every rank learns


@pytest.mark.slow
def test_the_best_number_of_servers_costs_what_equation_6_says() -> None:
    program = separated()
    server = next(c for c in program.plan.candidates if c.strategy == "parameter_server")
    parameters = sum(p.numel() for p in alexnet(width=0.25).parameters())
    alone = next(c for c in program.plan.candidates if c.strategy == "single_device").program_seconds
    device, link = load_cluster(CLUSTER).device, load_cluster(CLUSTER).link
    updated = 8 * 4 * parameters / (device.memory_bandwidth * device.efficiency_of("memory"))
    latencies = math.ceil(4 * parameters / 4e6) * link.latency  # of a message for each bucket
    expected = 2 * 2 * (4 * parameters / (2 * link.bandwidth) + latencies) + alone - updated
    assert len(server.roles["server"]) == 2 and server.program_seconds == pytest.approx(expected)
    assert server.global_batch == 8 and server.samples_per_second == pytest.approx(8 / server.step_seconds)
    assert server.exact and server.feasible and not server.why


def test_a_world_of_one_has_no_parameter_server() -> None:
    x, y = class_batch((4, 6), classes=3)
    program = compiled(nn.Linear(6, 3), (x,), y, F.cross_entropy, 1)
    server = next(c for c in as_json(program.program)["candidates"] if c["strategy"] == "parameter_server")
    assert not server["feasible"] and "no room for 1 server" in server["why"]
    assert math.isfinite(server["step_seconds"])
    assert re.search(r"^parameter_server +not possible$", report(program.program), re.MULTILINE)


@pytest.mark.slow
def test_auto_chooses_the_fastest_of_the_exact_plans_that_fit() -> None:
    torch.manual_seed(0)
    x, y = class_batch((4, 6), classes=3)
    for world in (1, 2, 5):
        plan = compiled(nn.Linear(6, 3), (x,), y, F.cross_entropy, world).plan
        possible = [c for c in plan.candidates if c.feasible and c.exact]
        assert plan.strategy == max(possible, key=lambda c: c.samples_per_second).strategy
        assert plan.samples_per_second == pytest.approx(max(c.samples_per_second for c in possible))


@pytest.mark.slow
@pytest.mark.parametrize("period", [1, 4])
def test_a_plan_in_rounds_is_marked_and_its_bytes_are_means(period: int) -> None:
    x, y = class_batch((4, 6), classes=3)
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    done = compiled(network, (x,), y, F.cross_entropy, 2, f"local_sgd(period={period})")
    number = f"{period} update{'s' * (period > 1)}"
    text = report(done.program)
    assert f"approximate: rounds of {number} by each rank alone, then averaged" in " ".join(text.split())
    assert "local_sgd (approximate)" in text
    data = as_json(done.program)
    assert (data["rounds"]["steps"], data["rounds"]["unit"]) == (period, 1)
    parameters = sum(p.nbytes for p in network.parameters())
    assert sum(layer["sent_bytes"] for layer in data["layers"]) == pytest.approx(parameters / period, abs=2)
    for rank in data["ranks"]:
        assert rank["sent_bytes"] == rank["received_bytes"] == int((parameters + 8) / period)
    mine = {each["strategy"]: each["exact"] for each in data["candidates"]}
    assert not mine["local_sgd"] and mine["data_parallel"]
    for rank in range(2):
        header = " ".join(done.files[f"rank{rank}.py"].split('"""')[1].split())
        assert f"trains approximately: rounds of {number}" in header and "a step, as the mean over a round" in header


@pytest.mark.slow
def test_the_memory_of_a_rank_includes_what_ends_a_round() -> None:
    x, y = class_batch((1, 64), classes=64)
    found = []
    for period in (1, 6):
        done = compiled(nn.Linear(64, 64), (x,), y, F.cross_entropy, 2, f"local_sgd(period={period})")
        found.append(as_json(done.program)["ranks"][0]["memory_bytes"])
    assert found[0] == pytest.approx(found[1], abs=8), "but the loss of a step"


@pytest.mark.slow
def test_bytes_of_layers_add_up_to_those_of_ranks_in_rounds_of_units_and_of_subnets() -> None:
    x, y = class_batch((4, 6), classes=3)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    for strategy in ("local_sgd(period=4)", "independent_subnets(local_steps=4)"):
        done = compiled(model, (x,), y, F.cross_entropy, 2, strategy)
        data = as_json(done.program)
        sent = sum(layer["sent_bytes"] for layer in data["layers"])
        statistics = 2 * 8 * 4 / 4 * strategy.startswith("local")
        assert sent + statistics + 8 / 4 == pytest.approx(data["ranks"][0]["sent_bytes"], abs=4), strategy
        if "subnets" in strategy:
            assert {layer["holding"] for layer in data["layers"]} == {"subnet"}
            assert report(done.program).count(" subnet ") == len(data["layers"])


@pytest.mark.slow
def test_a_gradient_that_a_unit_sums_and_units_average_counts_twice() -> None:
    done = planned(4, "modulo_shard(mp=2, period=4)")
    sent = {layer["name"]: layer["sent_bytes"] for layer in as_json(done.program)["layers"]}
    assert sent["conv"] == 120 + 120 / 4, "30 parameters over two ranks, and once in 4 updates over two units"
