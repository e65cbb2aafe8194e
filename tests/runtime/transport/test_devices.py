"""Which devices and backend ranks take, decided from what each has told the others; the GPUs are pretended."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from splitc.errors import LaunchError
from splitc.runtime.launch import main as launching
from splitc.runtime.launch.options import add_options
from splitc.runtime.transport import distributed
from splitc.runtime.transport.devices import Seat, choose, device_of, in_words, wanted

GPUs = Callable[..., None]


def seats(*places: str, in_sight: int = 4, backend: str | None = None) -> list[Seat]:
    """Of ranks at `host/device/gpu`; without a gpu on the CPU."""
    parts = [place.split("/") for place in places]
    return [Seat(host, device, gpu[0] if gpu else None, in_sight, backend) for host, device, *gpu in parts]


def said(*places: str, **given: Any) -> str:
    told = seats(*places, **given)
    return in_words(told, choose(told, "a remedy"))


def test_ranks_with_a_gpu_each_take_nccl_and_say_which() -> None:
    assert said(*(f"a/cuda:{k}/g{k}" for k in range(4))) == "4 ranks on cuda:0..3, NCCL"
    assert said("a/cuda:0/g", in_sight=1) == "1 rank on cuda:0, NCCL"
    assert said(*(f"a/cuda:{k}/g{k}" for k in (0, 1, 3))) == "3 ranks on cuda:0..1, 3, NCCL"
    two = [f"{host}/cuda:{k}/{host}{k}" for host in "ab" for k in range(4)]
    assert said(*two) == "8 ranks on 2 hosts with cuda:0..3 each, NCCL"
    assert said(*two[:7]) == "7 ranks on 2 hosts with cuda:0..3 and cuda:0..2, NCCL"


def test_ranks_that_see_one_gpu_each_take_nccl() -> None:
    assert said(*(f"a/cuda:0/g{k}" for k in range(4)), in_sight=1) == "4 ranks on cuda:0 of each rank, NCCL"


def test_ranks_that_share_a_gpu_or_are_told_to_travel_through_the_cpu_and_say_why() -> None:
    through = "tensors travel through the CPU (gloo)"
    assert said("a/cuda:0/g", "a/cuda:0/g", in_sight=1) == f"2 ranks share cuda:0: {through}"
    two = [f"{host}/cuda:{k % 2}/{host}{k % 2}" for host in "ab" for k in range(4)]
    assert said(*two, in_sight=2) == f"8 ranks on 2 hosts share cuda:0..1 each: {through}"
    own = said("a/cuda:0/g0", "a/cuda:1/g1", backend="gloo")
    assert own == f"2 ranks on cuda:0..1: {through}, as was asked"
    assert said("a/cuda:0/g", "b/cpu") == f"2 ranks, 1 of them on the CPU: {through}"


def test_the_cpu_is_named_where_there_are_gpus_alone() -> None:
    assert said("a/cpu", "a/cpu") == "2 ranks on the CPU, gloo, though torch sees GPUs"
    assert said("a/cpu", "a/cpu", in_sight=0) == ""


def test_nccl_without_a_gpu_for_each_rank_is_refused_with_ranks_host_and_remedy() -> None:
    shared = seats("n1/cuda:0/g0", "n1/cuda:1/g1", "n1/cuda:0/g0", in_sight=2, backend="nccl")
    text = "needs a GPU for each rank, but ranks 0, 2 share cuda:0 of n1 \\(GPUs in its sight: 2\\); a remedy"
    with pytest.raises(LaunchError, match=text):
        choose(shared, "a remedy")
    with pytest.raises(LaunchError, match=r"but rank 1 computes on the CPU of n2 \(GPUs in its sight: 0\); a remedy"):
        choose([*seats("n1/cuda:0/g", backend="nccl"), *seats("n2/cpu", in_sight=0, backend="nccl")], "a remedy")


def test_ranks_that_want_different_backends_are_refused() -> None:
    with pytest.raises(LaunchError, match="the ranks must agree on the backend: rank 0 has 'gloo', rank 1 has None"):
        choose([*seats("a/cuda:0/g", backend="gloo"), *seats("a/cuda:1/h")], "a remedy")


def test_what_a_group_of_the_programs_own_leaves_to_choose() -> None:
    assert [wanted(each) for each in (None, "gloo", "nccl")] == [None, "gloo", "nccl"]
    assert wanted("cuda:nccl") == "nccl"  # of init_process_group() on a machine with GPUs
    assert wanted("cpu:gloo,cuda:nccl") is None
    assert [wanted(each) for each in ("cpu:gloo,cuda:gloo", "cpu:gloo")] == ["gloo", "gloo"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> GPUs:
    """Pretend that torch sees GPUs, and that this process is the only rank of its start."""

    def pretend(number: int, **properties: Any) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))

    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 5,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    for name in ("LOCAL_WORLD_SIZE", "SPLITC_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    return pretend


def test_local_ranks_take_the_gpus_in_turn(gpus: GPUs) -> None:
    gpus(4)
    assert [device_of(each) for each in (None, "cuda", "cuda:3", "cpu")] == [
        torch.device("cuda", 1), torch.device("cuda", 1), torch.device("cuda", 3), torch.device("cpu")
    ]  # fmt: skip
    gpus(1)  # as under srun --gpus-per-task 1
    assert device_of(None) == torch.device("cuda", 0)
    gpus(0)
    assert device_of(None) == torch.device("cpu")
    with pytest.raises(LaunchError, match="torch sees no GPU"):
        device_of("cuda")


def test_a_gpu_is_known_by_its_slot_as_nccl_does_or_else_by_its_uuid(gpus: GPUs) -> None:
    slot = {"pci_domain_id": 0, "pci_bus_id": 7, "pci_device_id": 0}
    found = []
    for properties in ({"uuid": "A", **slot}, {"uuid": "MIG-B", **slot}, {"uuid": "A"}, {"uuid": "B"}, {}):
        gpus(2, **properties)
        found.append(Seat.of(torch.device("cuda", 1), None).gpu)
    assert found[0] == found[1] and len(set(found)) == 4
    assert Seat.of(torch.device("cpu"), None).gpu is None


@pytest.fixture
def joined(gpus: GPUs, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Call `init` as the only rank, on a store of this process; returns what torch was asked for."""

    def join(config: str | None = None, **options: Any) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        monkeypatch.setattr(distributed, "rendezvous", lambda *_, **__: iter([(HashStore(), 0, 1)]))
        monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: seen.update(backend=backend, **more))
        if config is not None:
            monkeypatch.setattr(dist, "is_initialized", lambda: True)
            monkeypatch.setattr(dist, "get_rank", lambda: 0)
            monkeypatch.setattr(dist, "get_world_size", lambda: 1)
            monkeypatch.setattr(dist, "get_backend_config", lambda: config)
            monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", HashStore)
        monkeypatch.setattr(distributed, "require_equal", lambda *_: None)

        def transport(where: torch.device, seconds: float, owns: bool, **more: Any) -> SimpleNamespace:
            seen.update(where=str(where), seconds=seconds, **more)
            return SimpleNamespace(watch=lambda: None)

        monkeypatch.setattr(distributed, "TorchTransport", transport)
        distributed.init(1, **options)
        return seen

    return join


def test_one_rank_on_a_gpu_takes_nccl_with_its_longer_timeout(
    gpus: GPUs, joined: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2, uuid="A")
    seen = joined()
    assert (seen["backend"], seen["where"], seen["staged"], seen["seconds"]) == ("nccl", "cuda:1", False, 600.0)
    assert seen["timeout"] == timedelta(seconds=600) and seen["rank"] == 0 and seen["world_size"] == 1
    assert seen["device_id"] == torch.device("cuda:1"), "NCCL's communicators are there at once"
    seen = joined(device="cpu")
    assert seen["device_id"] is None
    assert (seen["backend"], seen["where"], seen["staged"], seen["seconds"]) == ("gloo", "cpu", False, 120.0)
    monkeypatch.setenv("SPLITC_TIMEOUT", "7")
    assert joined()["seconds"] == 7.0


def test_a_group_that_is_bound_to_a_gpu_says_which_it_is(
    gpus: GPUs, joined: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(4, uuid="A")
    bound = SimpleNamespace(bound_device_id=torch.device("cuda", 3))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=bound))
    assert joined("cuda:nccl")["where"] == "cuda:3"
    assert joined("cuda:nccl", device="cuda:2")["where"] == "cuda:2"
    bound.bound_device_id = None
    assert joined("cuda:nccl")["where"] == "cuda:1"


def test_the_backends_of_a_group_that_is_there_decide_what_is_staged(
    gpus: GPUs, joined: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(1, uuid="A")
    chosen: list[int] = []
    monkeypatch.setattr(distributed, "choose_interface", lambda: chosen.append(1))
    staged = {config: joined(config)["staged"] for config in ("cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo")}
    assert staged == {"cuda:nccl": False, "cpu:gloo,cuda:nccl": False, "cpu:gloo,cuda:gloo": True}
    assert chosen == [1, 1]  # where it has NCCL, for the groups of gloo that are made beside it
    with pytest.raises(LaunchError, match="make the process group with the backend 'cpu:gloo,cuda:nccl'"):
        joined("cuda:nccl", device="cpu")


def test_rank_0_says_what_a_run_takes_where_it_is_asked_to(
    gpus: GPUs, joined: Callable[..., dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    gpus(1, uuid="A")
    joined()
    assert capfd.readouterr().err == ""
    joined(tell=True)
    assert capfd.readouterr().err == "1 rank on cuda:0, NCCL\n"
    gpus(0)
    joined(tell=True)
    assert capfd.readouterr().err == ""


def test_launch_py_takes_a_device_and_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def init(world: int, backend: str | None, device: str | None, tell: bool) -> None:
        asked.update(backend=backend, device=device, tell=tell)
        raise LaunchError("far enough")

    def train(args: Any) -> None:
        with launching.open_worker(__file__, 2, torch.optim.SGD, args):
            pass

    monkeypatch.setattr(launching, "init", init)
    monkeypatch.setattr(launching, "guarded", lambda run, history=None: run())
    monkeypatch.setattr("sys.argv", ["launch.py", "--device", "cpu"])
    with pytest.raises(LaunchError, match="far enough"):
        launching.main(train, 2)
    assert asked == {"backend": None, "device": "cpu", "tell": True}


def test_launch_py_takes_an_optimizer_and_a_rate_from_its_options() -> None:
    weights = [("weight", torch.nn.Parameter(torch.zeros(2)))]

    def made(*words: str) -> torch.optim.Optimizer:
        parser = argparse.ArgumentParser()
        add_options(parser)
        return launching._asked(lambda params: torch.optim.SGD(params, lr=0.5), parser.parse_args(words))(weights)

    assert [type(each).__name__ for each in (made(), made("--optimizer", "torch.optim:Adam"))] == ["SGD", "Adam"]
    rates = [made(*words).param_groups[0]["lr"] for words in ((), ("--lr", "0.25"))]
    assert rates == [0.5, 0.25]
    with pytest.raises(LaunchError, match="--optimizer builtins:list gives a list, not an optimizer"):
        made("--optimizer", "builtins:list")
    with pytest.raises(LaunchError, match=r"--optimizer torch\.optim:Adams: torch\.optim has no Adams"):
        made("--optimizer", "torch.optim:Adams")


def test_every_rank_learns_of_all_through_the_store() -> None:
    store, told = HashStore(), dict[int, list[Seat]]()
    places = seats("a/cuda:0/g0", "a/cuda:1/g1", "b/cuda:0/g2")

    def rank(k: int) -> None:
        told[k] = distributed._told(store, k, 3, places[k])

    threads = [threading.Thread(target=rank, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert told == {0: places, 1: places, 2: places}
