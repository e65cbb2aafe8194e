"""Mixed precision: forwards under bfloat16 autocast, float32 parameters, and the same training as in one process."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from splitc.cli.plan_file import read_plan_file
from splitc.compiled import CompiledProgram
from splitc.deferred import DeferredProgram
from splitc.errors import ArgumentError, LaunchError
from splitc.ir.graph import tensor_spec
from splitc.ir.program import Program
from splitc.ir.regions import regions
from splitc.ir.wire import wire
from splitc.ir.wire_op import Payload
from splitc.passes.analysis import fingerprint
from splitc.runtime.transport.base import Transport
from splitc.runtime.worker import Worker
from tests.support.capturing import here, node
from tests.support.command import NET, edited
from tests.support.command import splitc as command
from tests.support.compiled import CLUSTER, analyse, compiled, with_files
from tests.support.models import made, vectors
from tests.support.ranks import PINS, SEPARATION, Net, batch_of, on_ranks, on_workers, part_of, worker_of
from tests.support.sampling import along

BF16 = torch.bfloat16
STRATEGIES = {
    "single_device": 1,
    "data_parallel": 3,
    "data_parallel(sync_batchnorm=True)": 2,
    "layer_separation(n_c=2, n_f=1)": 3,
    "layer_separation(ranks=2+1+1)": 4,
    "hybrid_single": 3,
    "late_multiply": 3,
    "parameter_server(servers=1)": 3,
    "modulo_shard(mp=2, scheme=BK)": 4,
    "modulo_shard(mp=2, scheme=B)": 4,
    "modulo_shard(mp=2, scheme=B/K)": 4,
}
"""Strategy -> ranks."""


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 48), nn.Linear(48, 32), nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.third(self.second(self.first(images.flatten(1)).relu()).relu())
        return scores


@cache
def analysed(kind: Callable[[], nn.Module], autocast: torch.dtype | None) -> tuple[nn.Module, Tensor, Tensor, Program]:
    """A model, its batch and what is known of it, once for all plans."""
    model, (images, labels) = kind(), batch_of(4)
    return model, images, labels, analyse(model, (images,), labels, F.cross_entropy, autocast=autocast)


def program(
    strategy: str, kind: Callable[[], nn.Module] = Net, autocast: torch.dtype | None = BF16, **options: Any
) -> CompiledProgram:
    model, images, labels, known = analysed(kind, autocast)
    world = STRATEGIES[strategy]
    return compiled(
        model, (images,), labels, F.cross_entropy, world, strategy, analysed=known, autocast=autocast, **options
    )


def separated(autocast: torch.dtype | None = BF16) -> CompiledProgram:
    return program(SEPARATION, autocast=autocast, pins=PINS)


# -- what is captured --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_forward_does_with_its_own_dtypes_is_captured() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        assert torch.is_autocast_enabled("cpu") == (h.dtype == BF16)
        kept = torch.zeros_like(h)
        kept[:, :4] = h[:, :4]
        return m.fc(kept @ m.mix.to(h.dtype))

    model = made(run, first=nn.Linear(8, 8), mix=nn.Parameter(torch.randn(8, 8)))
    for autocast in (None, BF16):
        done = compiled(model, (vectors()(),), torch.arange(4), F.cross_entropy, 2, "data_parallel", autocast=autocast)
        assert done.verify(steps=2).holds
    assert "torch.bfloat16" in done.files["all.py"]


@pytest.mark.slow
def test_activations_are_kept_in_bfloat16() -> None:
    narrow, wide = (analysed(Net, autocast)[3].costs["features.0"] for autocast in (BF16, None))
    more, less = (
        wide.at(200).saved_bytes - wide.at(100).saved_bytes,
        narrow.at(200).saved_bytes - narrow.at(100).saved_bytes,
    )
    assert 0 < less < 0.8 * more


@pytest.mark.slow
def test_the_fingerprint_tells_autocast() -> None:
    narrow, wide = (analysed(Net, autocast)[3] for autocast in (BF16, None))
    assert fingerprint(narrow).endswith("-bfloat16") and len(fingerprint(wide)) == 12
    assert fingerprint(narrow).removesuffix("-bfloat16") == fingerprint(wide)  # their graphs are the same
    assert separated().plan.hash != separated(None).plan.hash


# -- what is generated -------------------------------------------------------------------------------------------------


def test_each_forward_stands_in_a_region_and_each_backward_outside() -> None:
    files = separated().files
    assert "    with comm.autocast(torch.bfloat16):\n        cut0 = stage(comm, images)\n" in files["conv.py"]
    assert "\n    comm.send(cut0.to(torch.bfloat16), " in files["conv.py"]
    for text in (files["conv.py"], files["fc.py"]):
        assert text.count(".autocast(torch.bfloat16):\n        ") == 3  # in step, evaluate and predict
    assert "        loss = stage.loss(comm, stage(comm, cut0), target)\n    total" in files["fc.py"]
    assert "\n    loss.backward()" in files["fc.py"]
    assert "comm.send(target," in files["conv.py"]


def test_a_cut_in_bfloat16_is_half_the_bytes() -> None:
    def sizes(done: CompiledProgram) -> dict[tuple[int, Payload], float]:
        ops = [(rank, op) for rank in range(3) for op in wire(done.program, rank)]
        return {(rank, op.payload): op.sent for rank, op in ops if op.payload.name == "cut0" and op.kind == "send"}

    narrow, wide = sizes(separated()), sizes(separated(None))
    assert len(narrow) == 4 and all(narrow[op] == wide[op] / 2 > 0 for op in wide)


@pytest.mark.slow
def test_ranks_send_what_the_wire_says_and_parameters_and_gradients_are_float32() -> None:
    for strategy in STRATEGIES:
        done = program(strategy)

        def step(worker: Worker, done: CompiledProgram = done) -> tuple[int, set[torch.dtype]]:
            worker.step(*part_of(worker, batch_of(done.plan.global_batch), done.plan.local_batches))
            tensors = (*worker.gradients().values(), *worker.stage.parameters())
            return worker.rank.sent_bytes, {tensor.dtype for tensor in tensors}

        for rank, (nbytes, dtypes) in enumerate(on_workers(done, step)):
            ops = wire(done.program, rank)
            assert dtypes <= {torch.float32}, strategy
            if "sync" not in strategy:  # whose sums are in float32
                assert abs(nbytes - sum(op.sent for op in ops)) <= 8 * len(ops), strategy


# -- what is trained ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@along(1, strategy=STRATEGIES, kind=[Perceptron, Net])
def test_every_strategy_trains_as_one_process_under_autocast(strategy: str, kind: type[nn.Module]) -> None:
    result = program(strategy, kind).verify(steps=2)
    assert result.holds and result.tolerance == 2e-2, str(result)
    assert result.dtype == "float32 under autocast to bfloat16"


@pytest.mark.slow
@pytest.mark.processes
def test_real_processes_train_as_one_process_under_autocast() -> None:
    result = program("modulo_shard(mp=2, scheme=B)").verify(steps=2, processes=True)
    assert result.holds, str(result)


@pytest.mark.slow
def test_float64_turns_autocast_off_on_both_sides_and_says_so() -> None:
    result = separated().verify(dtype=torch.float64)
    assert result.holds and result.tolerance == 1e-9, str(result)
    assert "autocast was off on both sides" in result.notes
    assert "autocast was off on both sides" not in separated().verify(steps=2).notes


@pytest.mark.parametrize("factor", [0.9, 0.0])
def test_a_wrong_gradient_is_seen_under_autocast(factor: float) -> None:
    wrong = with_files(separated(), fc=("comm.send(cut0.grad,", f"comm.send({factor} * cut0.grad,"))
    result = wrong.verify(steps=2)
    assert not result.holds and "features.1" in result.where


def test_evaluate_is_the_models_loss_under_autocast() -> None:
    done = separated()
    model = copy.deepcopy(analysed(Net, BF16)[0]).eval()
    images, labels = batch_of(8)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        expected = F.cross_entropy(model(images), labels)
    for loss in on_workers(done, lambda w: float(w.evaluate(*part_of(w, (images, labels), done.plan.local_batches)))):
        assert loss == pytest.approx(float(expected), rel=1e-5)


# -- what is refused ---------------------------------------------------------------------------------------------------


def entering(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16):  # here
        return m.fc(x)


def leaving(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):  # here
        return m.fc(x)


def halving(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):  # here
        return m.fc(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "autocast", "text"),
    [
        (entering, None, "forward enters torch.autocast in bfloat16 itself"),
        (halving, None, "forward enters torch.autocast in float16 itself"),
        (halving, BF16, "and compile with autocast=torch.bfloat16"),
        (leaving, BF16, "forward turns torch.autocast off for a part of itself"),
    ],
)
def test_a_module_with_another_autocast_stays_the_users_own_code(
    run: Callable[..., Any], autocast: torch.dtype | None, text: str
) -> None:
    enter = torch.autocast.__enter__
    done = compiled(made(run), (vectors()(),), torch.arange(4), F.cross_entropy, 2, "data_parallel", autocast=autocast)
    ((_, own),) = regions(done.program)
    assert own.why.startswith(f"{here(run)}: ") and text in own.why
    assert torch.autocast.__enter__ is enter
    assert done.verify(steps=2).holds


@pytest.mark.slow
def test_an_autocast_around_compile_or_the_same_one_inside_forward_changes_nothing() -> None:
    with torch.autocast("cpu", BF16):
        done = compiled(Perceptron(), (batch_of(4)[0],), torch.arange(4), F.cross_entropy, 2, "data_parallel")
    assert tensor_spec(node(done.program, "first")).dtype == torch.float32
    for run, autocast in ((entering, BF16), (leaving, None)):
        known = analyse(made(run), (vectors()(),), torch.arange(4), F.cross_entropy, autocast=autocast)
        assert tensor_spec(node(known, "fc")).dtype == (autocast or torch.float32)


@pytest.mark.parametrize("autocast", [None, BF16])
def test_a_step_inside_autocast_is_refused(autocast: torch.dtype | None) -> None:
    done = separated(autocast)

    def step(transport: Transport) -> None:
        worker = worker_of(done, transport)
        batch = part_of(worker, batch_of(8), done.plan.local_batches)
        for call in (worker.step, worker.evaluate):
            with torch.autocast("cpu", BF16), pytest.raises(LaunchError, match=r"compile with autocast=torch.bfloat16"):
                call(*batch)
        worker.step(*batch)

    on_ranks(3, step)


@pytest.mark.parametrize(
    ("dtype", "text"), [(torch.float64, "give torch.bfloat16 or torch.float16"), (True, "it must be a dtype")]
)
def test_other_dtypes_are_refused(dtype: Any, text: str) -> None:
    with pytest.raises((LaunchError, ArgumentError), match=text):
        splitc.compile(Perceptron(), 2, (batch_of(4)[0],), torch.arange(4), F.cross_entropy, autocast=dtype)


# -- plans and commands ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_tells_what_to_compile_it_with(tmp_path: Path) -> None:
    model, (images, labels) = Net(), batch_of(4)

    def again(**options: Any) -> Any:
        return splitc.compile(model, 3, (images,), labels, F.cross_entropy, cluster=CLUSTER, **options)

    made_with = again(strategy=SEPARATION, pins=PINS, autocast=BF16)
    plan = read_plan_file(made_with.save(tmp_path / "build") / "plan.json")
    assert "with comm.autocast(torch.bfloat16):" in (tmp_path / "build" / "conv.py").read_text()
    for options in ({}, {"autocast": BF16}):
        assert again(plan=plan, **options).files["conv.py"] == made_with.files["conv.py"]
    with pytest.raises(LaunchError, match=r"the plan was made without autocast=torch.bfloat16"):
        again(plan=again(strategy=SEPARATION, pins=PINS).plan, autocast=BF16)


def test_a_program_without_an_example_keeps_autocast_for_its_first_batch() -> None:
    deferred = splitc.compile(Net(), 2, loss=F.cross_entropy, strategy="data_parallel", cluster=CLUSTER, autocast=BF16)
    assert isinstance(deferred, DeferredProgram)
    assert deferred.compile(batch_of(4)).program.autocast == BF16


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "net", raising=False)
    (tmp_path / "net.py").write_text(NET)


@pytest.mark.slow
@pytest.mark.usefixtures("_here")
def test_commands_take_autocast(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "net.py --world 2 --strategy data_parallel --autocast"
    assert command(capsys, f"compile {asked} bfloat16 -o build -q").code == 0
    assert command(capsys, "compile net.py --plan build/plan.json -o again -q").code == 0
    assert Path("build/all.py").read_text() == Path("again/all.py").read_text()
    assert "with comm.autocast(torch.bfloat16):" in Path("again/all.py").read_text()
    done = command(capsys, f"verify {asked} bfloat16 --json -q")
    assert json.loads(done.out)["dtype"] == "float32 under autocast to bfloat16", done.err
    assert command(capsys, f"inspect {asked} bfloat16 -q").code == 0
    done = command(capsys, f"verify {asked} bf16 -q")
    assert done.code == 2 and "there are bfloat16 and float16" in done.err
    done = command(capsys, f"verify {asked} float16 --json -q")
    assert json.loads(done.out)["dtype"] == "float32 under autocast to float16", done.err
    done = command(capsys, "run build --autocast bfloat16")
    assert done.code == 2 and "compile it with: splitc compile MODEL --autocast bfloat16" in done.err


@pytest.mark.slow
@pytest.mark.usefixtures("_here")
def test_a_model_that_itself_fails_under_autocast_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    scattered = "torch.zeros(x.size(0), 8).scatter(1, torch.zeros(x.size(0), 8, dtype=torch.int64), self.first(x))"
    Path("net.py").write_text(edited(forward=f"        return self.second({scattered})"))
    asked = "inspect net.py --world 2 --strategy data_parallel -q"
    assert command(capsys, asked).code == 0
    done = command(capsys, f"{asked} --autocast bfloat16")
    assert done.code == 2 and "the model of Net does not run on its example under autocast at net.py:12" in done.err
