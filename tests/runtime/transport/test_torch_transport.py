"""What a transport asks of torch for NCCL: on gloo between threads, or of a stand-in for torch."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg

from splitc.runtime.transport.base import PeerLost, Transport
from splitc.runtime.transport.simulated import run_ranks
from splitc.runtime.transport.torch_transport import TorchTransport
from tests.runtime.transport.test_distributed import WORLD, exercise


class AsOnNccl(TorchTransport):
    """A transport on gloo that does what it does on NCCL."""

    waits_hold_the_stream = property(lambda self: True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Each thread has torch's process groups to itself; the names of collectives of lists that they ask for.

    gloo has none of unequal sizes: they are made of broadcasts and reductions here, as NCCL makes them.
    """
    names: list[str] = []
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(outputs: list[Tensor], own: Tensor, group: Any, async_op: bool) -> Any:
        names.append("all_gather" if (equal := len({len(x) for x in outputs}) == 1) else "unequal all_gather")
        if equal:
            return gather(outputs, own, group, async_op)
        outputs[dist.get_rank(group)].copy_(own)
        roots = dist.get_process_group_ranks(group)
        return [dist.broadcast(x, src, group, async_op) for src, x in zip(roots, outputs, strict=True) if len(x)]

    def reduce_scatter(total: Tensor, pieces: Sequence[Tensor], group: Any, async_op: bool) -> Any:
        names.append("reduce_scatter" if (equal := len({len(x) for x in pieces}) == 1) else "unequal reduce_scatter")
        if equal:
            return scatter(total, pieces, group=group, async_op=async_op)
        summands = [x.clone() for x in pieces]
        summands[dist.get_rank(group)] = total.copy_(pieces[dist.get_rank(group)])
        roots = dist.get_process_group_ranks(group)
        works = [
            dist.reduce(x, dst, group=group, async_op=True) for dst, x in zip(roots, summands, strict=True) if len(x)
        ]
        return [*works, SimpleNamespace(wait=lambda: summands.clear())]

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "reduce_scatter", reduce_scatter)
    multi_threaded_pg._install_threaded_pg()
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    isolate(True)
    yield names
    isolate(False)
    multi_threaded_pg._uninstall_threaded_pg()


def on_gloo(function: Callable[[Transport], Any]) -> list[Any]:
    """What `function` returns on each of three threads that do as on NCCL."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]

    def run(simulated: Transport) -> Any:
        dist.init_process_group(
            "gloo", store=store, rank=simulated.rank, world_size=WORLD, timeout=timedelta(seconds=30)
        )
        transport = AsOnNccl(torch.device("cpu"), 30.0, owns_process_group=True)
        try:
            return function(transport)
        finally:
            transport.close()

    return run_ranks(WORLD, run)


@pytest.mark.slow
def test_nccls_branches_do_what_simulated_ranks_do(asked: list[str]) -> None:
    assert on_gloo(exercise) == run_ranks(WORLD, exercise)
    assert set(asked) == {"all_gather", "unequal all_gather", "unequal reduce_scatter"}


def test_what_lies_together_is_gathered_and_scattered_where_it_is(asked: list[str]) -> None:
    everybody = tuple(range(WORLD))

    def action(t: Transport) -> list[Any]:
        whole = torch.zeros(WORLD, 2, dtype=torch.complex64)
        whole[t.rank] = own = torch.tensor([1j, t.rank])
        t.all_gather(list(whole), whole[t.rank], everybody).wait()
        t.reduce_scatter(own, list(whole), everybody).wait()
        columns = torch.arange(6, dtype=torch.int16).reshape(2, 3)
        second = torch.empty(2, 1, dtype=torch.int16)
        t.reduce_scatter(second, columns.split(1, dim=1), everybody).wait()  # these do not, and are copied
        return [whole.tolist(), own.tolist(), second.flatten().tolist()]

    seen = [[[[1j, 0], [1j, 1], [1j, 2]], [3j, 3 * rank], [3 * rank, 3 * rank + 9]] for rank in everybody]
    assert on_gloo(action) == seen
    assert not asked


def test_messages_have_a_communicator_for_each_direction_and_an_exchange_is_one_operation(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[tuple[int, Any, list[int]]] = []
    batch = dist.batch_isend_irecv

    def watched(operations: list[dist.P2POp]) -> list[dist.Work]:
        batches.append((dist.get_rank(), operations[0].group, [each.peer for each in operations]))
        return batch(operations)

    monkeypatch.setattr(dist, "batch_isend_irecv", watched)

    def action(t: Transport) -> None:
        assert isinstance(t, TorchTransport)
        t.connect([(0, 2)])
        x, others = torch.ones(1), [rank for rank in range(WORLD) if rank != t.rank]
        works = [t.isend(x, other) for other in others] + [t.irecv(torch.empty(1), other) for other in others]
        if t.rank != 1:
            works.append(t.exchange([(x, 2 - t.rank)], [(torch.empty(1), 2 - t.rank)], (0, 2)))
        for work in works:
            work.wait()
        down, up = t._ways
        assert down is not up and not {down, up} & {dist.group.WORLD, *t._groups.values()}
        found = [(group, peers) for rank, group, peers in batches if rank == t.rank]
        expected = [(up if other > t.rank else down, [other]) for other in others]
        expected += [(up if other < t.rank else down, [other]) for other in others]
        assert found == expected + ([(t._groups[0, 2], [2 - t.rank] * 2)] if t.rank != 1 else [])

    on_gloo(action)


def test_an_exchange_beside_training_stays_on_the_group_beside_it(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = dist.batch_isend_irecv

    def watched(operations: list[dist.P2POp]) -> list[dist.Work]:
        assert not {dist.group.WORLD} & {each.group for each in operations}
        return batch(operations)

    monkeypatch.setattr(dist, "batch_isend_irecv", watched)

    def action(t: Transport) -> float:
        side, theirs = t.side_group(), torch.empty(1)
        assert isinstance(side, TorchTransport) and not side.waits_hold_the_stream
        after, before = (t.rank + 1) % WORLD, (t.rank - 1) % WORLD
        side.exchange([(torch.tensor([float(t.rank)]), after)], [(theirs, before)], (0, 1, 2)).wait()
        return theirs.item()

    assert on_gloo(action) == [2, 0, 1]


class Asked:
    """In place of torch on rank 1 of 3 GPUs: notes which process groups it is asked for."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace()

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: list[tuple[Any, ...]] = []
        monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
        monkeypatch.setattr(dist, "get_world_size", lambda *_: WORLD)
        monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
        monkeypatch.setattr(dist, "barrier", lambda group, device_ids: self.groups.append((group, device_ids)))
        monkeypatch.setattr(dist, "new_group", self.new_group)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Asked.Options), raising=False)

    def new_group(self, ranks: list[int], timeout: timedelta, **options: Any) -> str:
        if ranks == [0, 1]:
            raise RuntimeError("ncclInvalidUsage")
        capped = options.pop("pg_options", None)
        assert capped is None or capped._timeout == timeout
        self.groups.append((*ranks, capped.config.max_ctas if capped else 0, options))
        return f"group {len(self.groups)}"


def test_every_rank_creates_all_groups_in_one_order_bound_to_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here, asked = torch.device("cuda", 1), Asked(monkeypatch)
    transport = TorchTransport(here, 30.0, owns_process_group=False)
    messages, options = (0, 1, 2, 8, {"device_id": here}), {"device_id": here}
    joined, *asked.groups = asked.groups
    assert joined == (None, [1]), "an operation of all ranks on the group that is there"
    assert asked.groups == [messages] * 2 and transport.waits_hold_the_stream

    told = [{(1, 2), (2,)}, {(0, 1, 2)}, {(0, 2), (1, 2)}]
    monkeypatch.setattr(transport, "all_gather_objects", lambda own: told)
    transport.connect([(0, 1, 2)])
    assert asked.groups[2:] == [(0, 2, 0, options), (1, 2, 0, options)]
    assert list(transport._groups.items()) == [((0, 1, 2), None), ((1, 2), "group 4")]
    transport.connect([(0, 1, 2)])
    assert len(asked.groups) == 4, "each is created once"

    told.append({(0, 1)})
    with pytest.raises(PeerLost, match=r"rank 1 of 3: connect ranks \(0, 1\): ncclInvalidUsage"):
        transport.connect([])
    transport.close()
