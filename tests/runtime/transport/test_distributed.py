"""Ranks as real processes: they do what simulated ranks do, and end when a peer is lost.

Importing torch takes seconds in every process, so each launch checks many things.
"""

import multiprocessing
import os
import queue
import re
import socket
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from splitc.errors import LaunchError
from splitc.runtime.collectives.layouts import Extents, State, Transition
from splitc.runtime.collectives.model_parallel import Group
from splitc.runtime.collectives.sync_batch_norm import batch_norm
from splitc.runtime.late_multiply.layers import LateMultiply
from splitc.runtime.launch import torchrun as launching
from splitc.runtime.transport import doubling
from splitc.runtime.transport.base import PeerLost, Transport
from splitc.runtime.transport.distributed import _ENVIRONMENT, init, rank_among, started_world
from splitc.runtime.transport.short import Short
from splitc.runtime.transport.simulated import run_ranks
from tests.support.transitions import TRANSITIONS, Case

WORLD = 3
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
          torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]  # fmt: skip


def launch(world: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120.0) -> dict[int, Any]:
    """Run `function(*arguments)` in `world` processes with torchrun's environment.

    Return the results of the ranks that came to an end; raise when one raised.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    processes = [
        context.Process(target=_process, args=(rank, world, port, results, function, arguments))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    ended: dict[int, tuple[Any, ...]] = {}
    deadline = time.monotonic() + seconds
    try:
        while len(ended) < world and time.monotonic() < deadline:
            running = any(process.is_alive() for process in processes)
            try:
                rank, result = results.get(timeout=0.1)
            except queue.Empty:
                if not running:
                    break
                continue
            if isinstance(result, BaseException):
                result.add_note(f"raised by rank {rank} of {world}")
                raise result
            ended[rank] = result
    finally:
        for process in processes:
            process.join(timeout=max(0.1, deadline - time.monotonic()))
            process.kill()
            process.join()
    return ended


def _process(rank: int, world: int, port: int, results: Any, function: Callable[..., Any], arguments: Any) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    try:
        results.put((rank, function(*arguments)))
    except Exception as error:
        results.put((rank, error))


def exercise(t: Transport) -> dict[str, Any]:
    """Use every operation; return what arrived, the same whatever carries it."""
    everybody, pair = (0, 1, 2), (0, 2)
    after, before = (t.rank + 1) % 3, (t.rank - 1) % 3
    seen: dict[str, Any] = {}

    # Each rank asks for its own: all are created, by all ranks in one order.
    asked: list[list[tuple[int, ...]]] = [[(1, 2), (0, 2)], [(0, 1), everybody], []]
    t.connect(asked[t.rank])
    t.connect([(1, 2)])

    rows = torch.arange(6.0).reshape(2, 3) + 10 * t.rank
    gotten = torch.empty(3, 2)
    works = [t.isend(rows.t(), after), t.irecv(gotten, before)]
    for work in works:
        work.wait()
        work.wait()
    seen["a transposed message round the ring"] = gotten.tolist()

    for dtype in DTYPES:
        x = torch.tensor([t.rank % 2, 1, 0]).to(dtype)
        moved, summed, told = torch.empty_like(x), x.clone(), x.clone()
        pieces = [torch.empty_like(x) for _ in everybody]
        own = torch.empty_like(x)
        doubled = x.clone()
        works = [
            t.isend(x, after),
            t.irecv(moved, before),
            t.all_reduce(summed, everybody),
            t.broadcast(told, 1, everybody),
            t.all_gather(pieces, x, everybody),
            t.reduce_scatter(own, [x, x.flip(0), x], everybody),
            doubling.all_reduce(t, doubled, everybody),
        ]
        for work in works:
            work.wait()
        seen[f"every operation on {dtype}"] = [
            moved.tolist(), summed.tolist(), told.tolist(), [piece.tolist() for piece in pieces], own.tolist(),
            doubled.tolist(),
        ]  # fmt: skip

    values = [torch.tensor(float(value)) for value in range(4)]
    if t.rank == 0:
        works = [t.isend(value, 1, tag) for value, tag in zip(values, (5, 6, 5, 6), strict=True)]
    else:
        arrived = [torch.tensor(-1.0) for _ in values]
        works = [t.irecv(x, 0, tag) for x, tag in zip(arrived, (6, 6, 5, 5), strict=True)]
        works = works if t.rank == 1 else []
        seen["order within a tag"] = arrived
    for work in works:
        work.wait()
    if t.rank:
        seen["order within a tag"] = [x.item() for x in seen["order within a tag"]]

    in_group = torch.tensor([1.0, float(t.rank)])
    if t.rank in pair:
        t.all_reduce(in_group, pair).wait()
        t.broadcast(in_group[:1], 2, pair).wait()
    if t.rank in (1, 2):
        t.all_reduce(in_group, (1, 2)).wait()
    seen["groups"] = in_group.tolist()

    whole = torch.zeros(5, 2)
    pieces = list(whole.split([1, 0, 4]))
    t.all_gather(pieces, torch.full_like(pieces[t.rank], t.rank + 1.0), everybody).wait()
    seen["an all_gather of unequal pieces"] = whole.tolist()

    pieces = list((torch.arange(10.0).reshape(2, 5) * 10**t.rank).split([1, 0, 4], dim=1))  # not contiguous
    own = torch.zeros(4, 2).t() if t.rank == 2 else torch.zeros_like(pieces[t.rank])
    t.reduce_scatter(own, pieces, everybody).wait()
    seen["a reduce_scatter of unequal pieces"] = own.tolist()

    crossed = torch.zeros(2)
    if t.rank in pair:
        t.exchange([(rows[0, :2], 2 - t.rank)], [(crossed, 2 - t.rank)], pair, tag=9).wait()
    seen["an exchange"] = crossed.tolist()
    sums = [torch.tensor([power, 10.0**t.rank]) for power in (1.0, 2.0)]
    for work in reversed([doubling.all_reduce(t, x, everybody) for x in sums]):
        work.wait()
    seen["two sums by doubling"] = [x.tolist() for x in sums]
    sums = [(torch.arange(70_000.0) % 1000 + t.rank) * factor for factor in (1, 2)]
    for work in reversed([Short(t, "exact", (3, 2, 0)).all_reduce(x, everybody) for x in sums]):
        work.wait()
    seen["two sums in unequal shares"] = [x[::9_999].tolist() for x in sums]
    seen["a group"] = exercise_group(t)

    empty = torch.empty(0, 4)
    works = [t.isend(empty, after), t.irecv(empty, before), t.all_reduce(empty, everybody)]
    works += [t.broadcast(empty, 0, everybody), t.all_gather([empty] * 3, empty, everybody)]
    for work in works:
        work.wait()

    strided = torch.ones(4) * (t.rank + 1)
    t.all_reduce(strided[::2], everybody).wait()
    t.broadcast(strided[1::2], 2, everybody).wait()
    seen["views that are not contiguous"] = strided.tolist()

    weight = torch.nn.Parameter(torch.full((2,), t.rank + 1.0))
    t.broadcast(weight, 1, everybody).wait()
    t.all_reduce(weight, everybody).wait()
    seen["a leaf that requires grad"] = weight.tolist()

    works = [t.all_reduce(value, everybody) for value in values]
    for work in reversed(works):
        work.wait()
    seen["several sums under way"] = [value.item() for value in values]

    seen["broadcast_object"] = t.broadcast_object({"from": t.rank}, src=2)
    seen["gather_objects"] = t.gather_objects((t.rank, "x" * 10**t.rank), dst=1)
    seen["all_gather_objects"] = t.all_gather_objects("abc"[t.rank])
    t.barrier()
    return seen


def exercise_group(t: Transport) -> dict[str, Any]:
    """Gather, scatter, normalise and multiply late with everyone: in whole numbers, whose sum has any order."""
    before, rows = t.sent_bytes, (2, 0, 3)
    group, late = Group(t, (0, 1, 2)), LateMultiply(t, (0, 1, 2))
    own = (torch.arange(8.0)[: rows[t.rank] * 2].reshape(-1, 2) + t.rank).double()
    weight, bias = (torch.ones(shape, dtype=torch.float64).requires_grad_() for shape in ((3, 2), (3,)))
    table, indices = torch.ones(5, 3, dtype=torch.float64).requires_grad_(), own.long() % 5
    late.gather_indices([indices], [[2 * each for each in rows]])
    found = late.table(F.embedding, table, indices, rows=[2 * each for each in rows], gathered=0)
    (late.linear(own, weight, bias, rows=rows).square().sum() + found.square().sum()).backward()
    late.finish()
    norm = nn.BatchNorm1d(2).double()
    batch_norm(group, own, norm)
    assert weight.grad is not None and bias.grad is not None and table.grad is not None
    return {
        "transitions": [exercise_transition(group, transition) for transition in TRANSITIONS],
        "late": (weight.grad.tolist(), bias.grad.tolist(), table.grad.tolist()),
        "statistics": [round(value, 12) for _, buffer in [*norm.named_buffers()][:2] for value in buffer.tolist()],
        "bytes": t.sent_bytes - before,
    }


def exercise_transition(group: Group, transition: Transition) -> list[Any]:
    """Value and gradient of whole numbers, all at a time or begun and waited for; two dtypes."""
    case, seen = Case((5, 4, 7), Extents((2, 0, 3), (1, 6, 0))), list[Any]()
    for dtype in (torch.float64, torch.float32):
        whole = torch.arange(140).reshape(case.shape).to(dtype)
        if transition.source is State.PARTIAL:
            whole = whole * (group.index + 1)
        x = (
            case.held(whole, transition.source, group.index).clone()
            if transition.source is not State.PARTIAL
            else whole
        )
        x.requires_grad_()
        begun = group.start(x, transition, case.extents)
        value = group.transition(x, transition, case.extents)
        (gradient,) = torch.autograd.grad(value, x, value.detach() + 1)
        seen += [value.tolist(), begun.wait().tolist(), gradient.tolist()]
    return seen


def assert_pieces_travel_once(t: Transport) -> None:
    """Where gloo has nothing good of its own, a rank sends each piece straight to the rank that needs it."""
    sent: list[int] = []
    batch = dist.batch_isend_irecv

    def counting(operations: list[dist.P2POp]) -> list[dist.Work]:
        sent.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return batch(operations)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "batch_isend_irecv", counting)
        pieces = [torch.ones(n, 2) for n in (1, 0, 4)]
        t.all_gather([torch.empty_like(piece) for piece in pieces], pieces[t.rank], (0, 1, 2)).wait()
        assert sent == [[8, 8], [], [32, 32]][t.rank]
        sent.clear()
        t.reduce_scatter(torch.empty_like(pieces[t.rank]), pieces, (0, 1, 2)).wait()
        assert sent == [[32], [8, 32], [8]][t.rank]


def thread_names() -> list[str]:
    """The threads of this process, those that libraries started among them."""
    return [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]


LEFT_OPEN = """
import atexit, os, sys, torch
from splitc.runtime.transport.distributed import init, rank_among, started_world
from tests.runtime.transport.test_distributed import thread_names
atexit.register(lambda: os.write(1, b"threads %d\\n" % sum("gloo" in name for name in thread_names())))
transport = init(world=2)
work = transport.all_reduce(torch.ones(3), (0, 1))
if len(sys.argv) == 1:
    work.wait()
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("unwaited", [False, True])
def test_a_transport_that_a_program_leaves_open_is_closed_unless_that_could_wait(
    unwaited: bool, tmp_path: Path
) -> None:
    script = tmp_path / "left_open.py"
    script.write_text(LEFT_OPEN)
    done = launching.torchrun([str(script), *["unwaited"] * unwaited], 2, quiet=True)
    threads = re.findall(r"threads (\d+)", done.stdout)
    assert len(threads) == 2 and all(bool(int(number)) == unwaited for number in threads), done


def exercise_thrice(meeting_point: str) -> list[dict[str, Any]]:
    """On a group made by `init`, the same staged through the CPU, and on a group of the user's."""
    transport = init(world=WORLD)
    assert (transport.device.type, transport.staged) == ("cpu", False)
    plain = exercise(transport)
    assert_pieces_travel_once(transport)
    transport.staged = True  # what several ranks on one GPU do; here the copies stay on the CPU
    staged = exercise(transport)
    transport.close()
    assert not dist.is_initialized()
    assert not [name for name in thread_names() if "gloo" in name]

    with pytest.raises(LaunchError, match="compiled for 5 ranks, but WORLD_SIZE is 3"):
        init(world=5)

    dist.init_process_group("gloo", f"file://{meeting_point}", rank=transport.rank, world_size=3)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    users = init(world=WORLD)
    joined = exercise(users)
    users.close()
    assert dist.is_initialized()
    dist.destroy_process_group()
    return [plain, staged, joined]


@pytest.mark.slow
@pytest.mark.processes
def test_processes_do_what_simulated_ranks_do(tmp_path: Path) -> None:
    expected = run_ranks(WORLD, exercise)
    real = launch(WORLD, exercise_thrice, str(tmp_path / "meeting_point"))
    for rank in range(WORLD):
        for seen in real[rank]:
            assert seen == expected[rank]


@pytest.mark.slow
def test_the_exercise_itself_is_right() -> None:
    seen = run_ranks(WORLD, exercise)[2]
    assert seen["a transposed message round the ring"] == [[10, 13], [11, 14], [12, 15]]
    for dtype in DTYPES[:-1]:
        assert seen[f"every operation on {dtype}"] == [
            [1, 1, 0], [1, 3, 0], [1, 1, 0], [[0, 1, 0], [1, 1, 0], [0, 1, 0]], [1, 3, 0], [1, 3, 0]
        ]  # fmt: skip
    assert run_ranks(WORLD, exercise)[1]["order within a tag"] == [1.0, 3.0, 0.0, 2.0]
    assert seen["groups"] == [3.0, 3.0]
    assert seen["an all_gather of unequal pieces"] == [[1.0] * 2] + [[3.0] * 2] * 4
    assert seen["a reduce_scatter of unequal pieces"] == [[111, 222, 333, 444], [666, 777, 888, 999]]
    assert seen["an exchange"] == [0.0, 1.0]
    assert seen["two sums by doubling"] == [[3.0, 111.0], [6.0, 111.0]]
    once = [3.0 * (k * 9_999 % 1000) + 3 for k in range(8)]
    assert seen["two sums in unequal shares"] == [once, [2 * each for each in once]]
    assert seen["views that are not contiguous"] == [6.0, 3.0, 6.0, 3.0]
    assert seen["a leaf that requires grad"] == [6.0, 6.0]
    assert seen["several sums under way"] == [0.0, 3.0, 6.0, 9.0]
    assert seen["broadcast_object"] == {"from": 2}
    assert seen["all_gather_objects"] == ["a", "b", "c"]


def lose_rank_2() -> tuple[str, float]:
    """Rank 2 dies; rank 0 waits for it, and rank 1 for rank 0 only, which then gives up."""
    transport = init()
    transport.barrier()
    start = time.monotonic()
    if transport.rank == 2:
        os._exit(1)
    with pytest.raises(PeerLost) as caught:
        transport.irecv(torch.empty(2, 3), 2 - 2 * transport.rank, tag=4).wait()
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(PeerLost, match="barrier"):
        transport.barrier()
    transport.close()
    return str(caught.value), time.monotonic() - start


@pytest.mark.slow
@pytest.mark.processes
def test_the_others_end_within_seconds_when_a_rank_dies() -> None:
    ended = launch(3, lose_rank_2)
    assert sorted(ended) == [0, 1]
    for rank, (text, seconds) in ended.items():
        peer = 2 - 2 * rank
        assert f"rank {rank} of 3: irecv (2, 3) float32 from rank {peer}, tag 4: " in text
        assert "onnection" in text
        assert seconds < 60


def wait_in_vain() -> str:
    os.environ["SPLITC_TIMEOUT"] = "1.5"
    transport = init(world=2)
    start = time.monotonic()
    if transport.rank == 1:
        time.sleep(2.5)
        return ""
    with pytest.raises(PeerLost) as caught:
        transport.all_reduce(torch.ones(1), (0, 1)).wait()
    assert 1 < time.monotonic() - start < 60
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_that_does_not_come_is_given_up_after_the_timeout_of_the_environment() -> None:
    text = launch(2, wait_in_vain)[0]
    assert text.startswith("rank 0 of 2: all_reduce (1,) float32 over ranks (0, 1): ")
    assert "within 1.5 s" in text


# launching


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set torchrun's environment as given and clear the rest of it."""

    def set_environment(**environment: str) -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                     "MASTER_PORT", "SPLITC_TIMEOUT"):  # fmt: skip
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return set_environment


def test_a_start_without_torchrun_says_how_to_start(torchrun: Callable[..., None]) -> None:
    torchrun(RANK="0")
    with pytest.raises(LaunchError) as caught:
        init(world=4)
    caught.match(r"not started by torchrun \(WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set\)")
    caught.match("run: torchrun --standalone --nproc-per-node 4 ")


def test_a_program_for_one_rank_needs_no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    left = {name: value for name, value in os.environ.items() if name not in _ENVIRONMENT}
    monkeypatch.setattr(os, "environ", left)
    for _ in range(2):
        transport = init(world=1, backend="gloo", device="cpu")
        assert (transport.rank, transport.world) == (0, 1)
        transport.close()


def test_a_start_with_another_number_of_ranks_names_both(torchrun: Callable[..., None]) -> None:
    torchrun(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    with pytest.raises(LaunchError) as caught:
        init(world=4)
    caught.match("compiled for 4 ranks, but WORLD_SIZE is 2; run: torchrun .* 4 ")


@pytest.mark.slow
def test_ranks_that_do_not_come_in_time_are_a_launch_error(torchrun: Callable[..., None]) -> None:
    torchrun(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    with pytest.raises(LaunchError, match=r"rank 1 of 2 did not find .*127\.0\.0\.1:1 within 1 s"):
        init(timeout=1.0)
    assert not dist.is_initialized()


def test_a_rank_that_does_not_come_is_named(torchrun: Callable[..., None]) -> None:
    distributed: Any = dist
    store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # as torchrun's own
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    torchrun(RANK="0", WORLD_SIZE="2", **agent)
    with pytest.raises(LaunchError, match=r"rank 0 of 2 did not find .* within 0\.2 s .*: no word from rank 1$"):
        init(timeout=0.2)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE", "GROUP_RANK"])
@pytest.mark.parametrize("value", ["", "one", "-1", "1.5", "10" * 9])
def test_variables_of_torchrun_that_are_no_numbers_are_named(
    torchrun: Callable[..., None], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    torchrun(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    monkeypatch.setenv(name, value)
    for read in (init, started_world, partial(rank_among, 2)):
        with pytest.raises(LaunchError, match=f"{name} is '{value}', which is no whole number; let torchrun set it"):
            read()
