"""A run goes on where its tensors are: meta stands for a GPU."""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitc.runtime.checkpoints import folders
from splitc.runtime.checkpoints.piece import packed, unpacked
from splitc.runtime.generators import random_state, same_generators, seeded_generators, set_random_state
from splitc.runtime.optimizers import device_of_state, load_by_name, set_options, state_by_name
from splitc.runtime.transport.mailbox import Mailbox
from splitc.runtime.transport.simulated import SimulatedTransport
from splitc.runtime.worker import Worker
from tests.runtime.checkpoints.test_resume import assert_equal, batches_of, small, steps
from tests.support.ranks import on_workers
from tests.support.run_state import run_state

GPU = torch.device("meta")


def trained(shape: tuple[int, ...], **options: Any) -> tuple[torch.optim.Optimizer, list[tuple[str, nn.Parameter]]]:
    named = [("weight", nn.Parameter(torch.ones(shape)))]
    optimizer = torch.optim.Adam([p for _, p in named], **options)
    named[0][1].grad = torch.ones(shape)
    optimizer.step()
    return optimizer, named


def devices_after_loading(shape: tuple[int, ...], was: str, **options: Any) -> dict[str, str]:
    """Of the state of a parameter on a GPU that is loaded from the CPU, where checkpoints are unpacked."""
    optimizer, named = trained(shape)
    saved = state_by_name(optimizer, named)
    moved = [("weight", nn.Parameter(named[0][1].detach().to(GPU)))]
    other = torch.optim.Adam([p for _, p in moved])
    other.param_groups[0].update(options)
    saved["param_groups"] = [{**saved["param_groups"][0], **options}]
    load_by_name(other, moved, saved, {"weight": {"step": was, "exp_avg": was, "exp_avg_sq": was}})
    assert other.param_groups[0]["params"] == [moved[0][1]]
    return {key: value.device.type for key, value in other.state[moved[0][1]].items()}


@pytest.mark.parametrize("shape", [(), (3, 2)])
def test_the_state_of_an_optimizer_in_rounds_is_loaded_beside_its_parameter(shape: tuple[int, ...]) -> None:
    of_cpu = devices_after_loading(shape, "cpu")
    assert of_cpu == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}
    for of_gpu in (devices_after_loading(shape, "cuda"), devices_after_loading(shape, "cpu", capturable=True)):
        assert of_gpu == {"step": "meta", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_options_that_are_tensors_stay_on_their_device() -> None:
    group: dict[str, Any] = {"params": [1], "lr": torch.ones((), device=GPU), "eps": 1.0}
    set_options(group, {"params": [2], "lr": torch.zeros(()), "eps": 2.0, "decay": torch.zeros(())})
    assert group["params"] == [1] and group["eps"] == 2.0
    assert group["lr"].device == GPU and group["decay"].device.type == "cpu"


def test_what_is_no_counter_is_beside_its_parameter_whatever_its_shape() -> None:
    parameter = nn.Parameter(torch.ones(3, 2, device=GPU))
    assert device_of_state({}, parameter, "row", 1, "cpu") == GPU
    assert device_of_state({}, parameter, "mu_product", 0, "cpu").type == "cpu"
    assert device_of_state({"fused": True}, parameter, "step", 0, "cpu") == GPU


def test_generators_of_every_gpu_are_seeded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    monkeypatch.setattr(torch.cuda, "get_rng_state", gpus[0].get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", gpus[0].set_state)
    before, drawn = [gpu.get_state() for gpu in gpus], list[list[Tensor]]()
    for _ in range(2):
        with seeded_generators("a key"):
            drawn.append([torch.rand(2, generator=gpu) for gpu in gpus])
    assert all(torch.equal(now.get_state(), state) for now, state in zip(gpus, before, strict=True))
    assert all(torch.equal(*pair) for pair in zip(*drawn, strict=True))


@pytest.mark.parametrize("kind", ["PCG64", "Philox"])
def test_the_state_of_any_generator_of_numpy_is_given_back_and_saved(kind: str) -> None:
    numpy: Any = np.random
    before = numpy.get_bit_generator()
    numpy.set_bit_generator(getattr(numpy, kind)(3))
    try:
        saved = unpacked(packed(random_state()))
        with same_generators():
            first = numpy.rand(3)
        assert np.array_equal(first, numpy.rand(3))
        set_random_state(saved)
        assert np.array_equal(first, numpy.rand(3))
    finally:
        numpy.set_bit_generator(before)


def test_the_state_of_an_earlier_checkpoint_is_set() -> None:
    numpy: Any = np.random.get_state()
    name, words, *rest = numpy
    version, own, normal = random.getstate()
    saved = {"torch": torch.get_rng_state(), "numpy": [name, torch.from_numpy(words.astype("int64")), *rest]}
    first = np.random.rand(), random.random()
    set_random_state({**saved, "python": [version, torch.tensor(own), normal]})
    assert first == (np.random.rand(), random.random())


def test_a_gpus_generator_is_saved_and_set_where_both_runs_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    without, given = random_state(), torch.arange(16, dtype=torch.uint8)
    set_states: list[Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: given)
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_states.append)
    saved = unpacked(packed(random_state()))
    assert torch.equal(saved["cuda"], given)
    set_random_state(without)  # of the CPU, or of an older version
    assert not set_states
    set_random_state(saved)
    assert [torch.equal(each, given) for each in set_states] == [True]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    set_random_state(saved)
    assert len(set_states) == 1


def test_the_thread_that_writes_is_on_the_ranks_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: begun.append((threading.current_thread().name[:10], device))
    )

    def run(worker: Worker) -> None:
        transport: Any = worker.rank.transport
        transport.device, transport.side_group = torch.device("cuda", 1), lambda: transport
        worker.save(tmp_path, asynchronous=True)
        worker.close()

    on_workers(small("data_parallel", 1), run)
    assert begun == [("checkpoint", torch.device("cuda", 1))]


def test_files_of_a_gpus_rank_travel_between_hosts_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(folders, "AT_ONCE", 1000)
    beside, program = Mailbox(2, None), small("data_parallel", 2)

    def on_gpus(worker: Worker) -> Path:
        """The worker's folder; from now on its transport is that of a GPU, and has another one beside it."""
        transport: Any = worker.rank.transport
        side: Any = SimulatedTransport(beside, transport.rank)
        send = side._isend
        transport.device, transport.side_group = torch.device("cuda", transport.rank), lambda: side
        transport._isend = transport._irecv = lambda *_: pytest.fail("a file on its way to a GPU")

        def counted(tensor: Tensor, *route: Any) -> Any:
            sizes.append(tensor.nbytes)
            return send(tensor, *route)

        side._isend = counted
        return tmp_path / str(transport.rank)

    def saved(worker: Worker) -> Any:
        steps(worker, batches_of(program, 2))
        worker.save(on_gpus(worker))
        return run_state(worker)

    expected = on_workers(program, saved)
    assert max(sizes) == 1000 < sum(sizes)
    sizes.clear()
    shutil.rmtree(tmp_path / "1")

    def resumed(worker: Worker) -> Any:
        worker.resume(on_gpus(worker))
        return run_state(worker)

    assert_equal(on_workers(program, resumed), expected)
    assert max(sizes) == 1000 < sum(sizes)
