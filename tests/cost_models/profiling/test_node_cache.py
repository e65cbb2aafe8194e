"""What was measured is kept, node by node, and found again under the same key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.cost_models.clusters.this_machine import device_name
from splitc.cost_models.compute.roofline import layer_seconds
from splitc.cost_models.profiling import measured
from splitc.cost_models.profiling.node_cache import NodeCache, node_keys
from splitc.ir.costs import Measured
from tests.support.measuring import captured, lines_of, pretend
from tests.support.models import CASES, Case, LanguageModel, labels, made, token_loss, tokens, vectors
from tests.support.small_programs import small_cluster


def longer_mlp() -> nn.Module:
    return nn.Sequential(*CASES["mlp"].model().children(), nn.Sigmoid())


def test_what_was_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, bench = captured("branches"), pretend(monkeypatch)
    first = lines_of(program, tmp_path)
    assert bench.runs == [2, 4]
    assert lines_of(captured("branches"), tmp_path) == first
    assert bench.runs == [2, 4]


def test_another_model_with_one_new_node_runs_and_keeps_what_was_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, 1e-3)
    lines_of(captured("mlp"), tmp_path)
    bench = pretend(monkeypatch, 5e-3)
    other = Case(longer_mlp, vectors(), labels(), F.cross_entropy)
    lines = lines_of(captured(other), tmp_path)
    assert bench.runs == [2, 4]
    (first,) = (m for m in [lines["0"].at(4).measured] if m is not None)
    assert first.forward == pytest.approx(2 * (1e-3 * 4 + 1e-2)), "the linear layer and its ReLU were known"


@pytest.mark.parametrize("change", ["torch", "machine"])
def test_times_of_another_machine_or_torch_are_not_used(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, bench = captured("mlp"), pretend(monkeypatch)
    lines_of(program, tmp_path)
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "99")
    else:
        monkeypatch.setattr(measured, "device_name", lambda: "another processor")
    lines_of(program, tmp_path)
    assert bench.runs == [2, 4, 2, 4]
    (one, two) = (json.loads(path.read_text()) for path in tmp_path.iterdir())
    assert one["machine"] != two["machine"]


@pytest.mark.parametrize("rubbish", ["", "[]", '{"machine": 1}', '{"nodes": {"a": [1]}}', "\udcff", '{"nodes": 3}'])
def test_a_cache_that_cannot_be_read_is_measured_again(
    rubbish: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, bench = captured("mlp"), pretend(monkeypatch)
    lines_of(program, tmp_path)
    (cache,) = tmp_path.iterdir()
    machine = json.dumps(json.loads(cache.read_text())["machine"])
    cache.write_text(rubbish.replace('{"nodes"', f'{{"machine": {machine}, "nodes"'), errors="surrogateescape")
    lines_of(program, tmp_path)
    assert bench.runs == [2, 4, 2, 4]
    assert json.loads(cache.read_text())["nodes"]


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    (tmp_path / "file").touch()
    assert lines_of(captured("mlp"), tmp_path / "file" / "below")


def test_two_processes_keep_what_both_measured(tmp_path: Path) -> None:
    one, two = NodeCache(tmp_path, "here"), NodeCache(tmp_path, "here")
    one.add({"a": Measured(1.0, 2.0, 3.0)})
    two.add({"b": Measured(4.0, 5.0, 6.0)})
    assert NodeCache(tmp_path, "here").entries == {"a": Measured(1.0, 2.0, 3.0), "b": Measured(4.0, 5.0, 6.0)}
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_times_of_a_slower_hour_count_at_the_speed_of_that_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Case(longer_mlp, vectors(), labels(), F.cross_entropy)
    pretend(monkeypatch, 1e-3, 0.0, 1e9)
    swift = lines_of(captured(two), tmp_path / "swift")
    lines_of(captured("mlp"), tmp_path / "mixed")
    pretend(monkeypatch, 2e-3, 0.0, 0.5e9)
    mixed = lines_of(captured(two), tmp_path / "mixed")
    assert {
        each.flop_rate for each in NodeCache(tmp_path / "mixed", f"{device_name()}, 1 thread").entries.values()
    } == {
        1e9,
        0.5e9,
    }
    for layer in swift:
        price, same = (layer_seconds(lines[layer].at(7), small_cluster().device, "float32") for lines in (swift, mixed))
        assert price == pytest.approx(same)


def keys_of(run: Callable[..., Tensor], batch: int = 4) -> dict[str, str]:
    return node_keys(captured(Case(lambda: made(run), vectors(), labels(), F.cross_entropy)), batch)


def test_a_key_tells_op_shapes_strides_and_gradients_apart() -> None:
    plain = keys_of(lambda m, x: m.fc(F.relu(m.a(x))))
    assert plain["relu"] == "torch.nn.functional.relu(float32[4, 8]') -> backward"
    assert set(keys_of(lambda m, x: m.fc(F.relu(m.a(x))), 5).values()).isdisjoint(plain.values())
    turned = keys_of(lambda m, x: m.fc(F.relu(m.a(x).t()).t()))
    assert turned["relu"] == "torch.nn.functional.relu(float32[8, 4] by [1, 8]') -> backward"
    unread = keys_of(lambda m, x: m.fc(m.a(x)) * F.relu(x).mean())
    assert unread["relu"] == "torch.nn.functional.relu(float32[4, 8])"
    twice = keys_of(lambda m, x: m.fc((lambda y: F.relu(y) + F.gelu(y))(m.a(x))))
    assert twice["relu"] == "torch.nn.functional.relu(float32[4, 8]'+) -> backward", "gelu's gradient is added there"
    assert "[4, 8]') -> backward" in twice["gelu"]


def test_a_tied_weight_adds_up_where_it_is_read_first() -> None:
    program = captured(Case(LanguageModel, tokens(), tokens(), token_loss))
    keys = node_keys(program, 4)
    assert keys["wte"].startswith("nn.Embedding(11, 8) of weight float32[11, 8]'+ ")
    assert keys["lm_head"].startswith("nn.Linear(8, 11, bias=False) of weight float32[11, 8]' ")
