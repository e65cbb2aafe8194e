"""The strict transport ends for programs as they are, and stops those in which one rank issues something else."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from splitc.compiled import CompiledProgram
from splitc.runtime.transport.base import CompletedWork, Deadlock, Mismatch, Transport
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled
from tests.support.every_strategy import images, planned
from tests.support.ranks import on_ranks, part_of, worker_of
from tests.support.sampling import sampled
from tests.support.strict import queued_transports, strict_transports
from tests.support.subnet_networks import CLASSES, INPUTS, chain

Use = Callable[[Worker, Any, Path], None]


@dataclass(frozen=True)
class Damage:
    """What some ranks of a plan do otherwise: other text in their files, or another use of their workers.

    words: of the error, which names ranks and what they issue or wait for.  ends: on other simulated ranks.
    """

    plan: str
    ranks: tuple[int, ...]
    words: str
    edits: tuple[tuple[str, str], ...] = ()
    use: Use | None = None
    ends: bool = False


PLANS = {
    "pieces": (2, "layer_separation(n_c=1,n_f=1,microbatches=2)"),
    "roles": (3, "layer_separation(ranks=1+1+1)"),
    "replicas": (3, "data_parallel"),
    "groups": (4, "modulo_shard(mp=2,scheme=BK)"),
    "servers": (3, "parameter_server(servers=2,overlap=False)"),
    "rounds": (3, "local_sgd(period=2,fragments=2,delay=1)"),
}

TARGET = r'( +)(target = comm\.recv\("stage0".*\n)( +cut1 = .*\n)'
LOSS = r"( +total = comm\.sum_loss\(loss\).*\n)((?:.*\n)*?)( +return total\.wait\(\)\n\n\ndef evaluate)"


def train(worker: Worker, batch: Any, folder: Path) -> None:
    for _ in range(3):
        worker.step(*batch)


def only_rank_0(name: str, with_batch: bool = False) -> Use:
    """A step, and then something collective on rank 0 alone, before the next step."""

    def use(worker: Worker, batch: Any, folder: Path) -> None:
        worker.step(*batch)
        if worker.rank.index == 0:
            getattr(worker, name)(*batch if with_batch else ())
        worker.step(*batch)

    return use


def without_barrier(worker: Worker, batch: Any, folder: Path) -> None:
    """An export after which rank 1 goes on at once."""
    transport = worker.rank.transport
    with patch.object(transport, "barrier", transport.barrier if transport.rank != 1 else lambda: None):
        worker.export(folder / "model.pt")
    worker.step(*batch)


def without_exchange(worker: Worker, batch: Any, folder: Path) -> None:
    """Two rounds, in the second of which rank 1 sends and receives no neurons."""
    transport = worker.rank.transport
    worker.step(*batch)
    with patch.object(
        transport, "_exchange", transport._exchange if transport.rank != 1 else lambda *_: CompletedWork()
    ):
        worker.step(*batch)


DAMAGED = {
    "sends that cross": Damage(
        "pieces", (1,), r"rank 0: message: \(2, 14\).* 0 to rank 1.*\n.*rank 1: message: \(2, 14\).* 1 to rank 0",
        ((r"    for k in comm\.microbatches\(\):\n        cut0\[k\] = (comm\[k\]\.irecv.*\)) .*\n", ""),
         (r"cut0\[k\] = cut0\[k\]\.wait", 'cut0[k] = comm[k].irecv("conv", (-1, 14), torch.float32).wait')),
        ends=True),
    "a send that is missing": Damage(
        "roles", (0,), r"rank 2 waits: message: \(4,\) int64 from rank 0 to rank 2.*not joined by rank 0",
        ((r'    comm\.send\(target, "stage2"\).*\n', ""),)),
    "a receive of another dtype": Damage(
        "roles", (1,), r"rank 0: message: \(4, 14\) float32.*\n.*rank 1: message: \(4, 14\) float64",
        ((r'(recv\("stage0", .*)float32', r"\1float64"),)),
    "a receive of another size": Damage(
        "roles", (1,), r"rank 0: message: \(4, 14\).*\n.*rank 1: message: \(4, 13\)",
        ((r'(recv\("stage0", \(-1, )14', r"\g<1>13"),)),
    "a receive from another rank": Damage(
        "roles", (2,), r"rank 1 waits: message: \(4, 13\).* 1 to rank 2.*not joined by rank 2",
        ((r'comm\.recv\("stage1"', 'comm.recv("stage0"'),)),
    "receives from two ranks in another order": Damage(
        "roles", (2,), r"rank 2 waits: message: \(4, 13\).* 1 to rank 2.*not joined by rank 1",
        ((TARGET, r"\3\1\2"),), ends=True),
    "a sum that a rank leaves out": Damage(
        "replicas", (1,), r"rank 0: all_reduce \(\d+,\) float32.*\n.*rank 1: all_reduce \(\) int64",
        ((r"with comm\.all_reduce\(stage, BUCKETS\):", "if True:"),)),
    "buckets in another order": Damage(
        "replicas", (2,), r"rank 0: all_reduce \(\d+,\).*\n.*rank 2: all_reduce \(\d+,\)",
        ((r"\n\n\ndef step", "\n\nBUCKETS = BUCKETS[::-1]\n\n\ndef step"),)),
    "two sums in another order": Damage(
        "replicas", (1,), r"rank 0: all_reduce \(\) float64.*\n.*rank 1: all_reduce \(\d+,\) float32",
        ((LOSS, r"\2\1\3"),)),
    "groups in a circle": Damage(
        "groups", (1, 2), r"rank 0 waits: all_reduce .* \(0, 2\); not joined by rank 2",
        ((r"with fc\.all_reduce\(stage, FC_BUCKETS\):(.*\n.*\n)    (.*reduce_scatter)",
          r"with fc.all_reduce(stage, FC_BUCKETS, early=False):\1        \2"),)),
    "a group that a rank leaves out": Damage(
        "groups", (3,), r"rank 2: all_gather \(4,\) int64.* \(2, 3\)\n.*rank 3: all_gather \(4, 14\) float32",
        ((r"fc\.modulo\(target\)", "target.repeat(2)"),)),
    "a server that takes gradients before it gives parameters": Damage(
        "servers", (2,), r"rank 0: message: .* from rank 2 to rank 0.*\n.*rank 2: message: .* from rank 0 to rank 2",
        ((r"(    comm\.send_parameters.*\n)((?:.*\n)*?)(    comm\.reduce.*\n)", r"\3\1\2"),)),
    "averages in another order": Damage(
        "rounds", (1,), r"rank 0: all_reduce \(\d+,\).*\n.*rank 1: all_reduce \(\d+,\)",
        ((r"\n\n\ndef step", "\n\nAVERAGED = AVERAGED[::-1]\n\n\ndef step"),)),
    "neurons that a rank does not exchange": Damage(
        "neurons", (), r"rank 0 waits: exchange among \(0, 1, 2\): .*not joined by rank 1", use=without_exchange),
    "a barrier that a rank leaves out": Damage(
        "replicas", (), r"rank 0: barrier .*\n.*rank 1: all_reduce", use=without_barrier),
    "evaluation on one rank": Damage(
        "replicas", (), r"rank 0: broadcast \(6,\) float32.*\n.*rank 1: all_reduce \(\)",
        use=only_rank_0("evaluate", True)),
    "the state on one rank": Damage(
        "groups", (), r"rank 0 waits: gather_objects to rank 0.*not joined by rank 1, 2, 3",
        use=only_rank_0("state_dict")),
    "the norm on one rank": Damage(
        "roles", (), r"rank 0 waits: all_reduce \(\) float64.*not joined by rank 1, 2", use=only_rank_0("grad_norm")),
}  # fmt: skip


def edited(program: CompiledProgram, edits: tuple[tuple[str, str], ...]) -> CompiledProgram:
    """The program with other text in its generated files."""
    files = dict(program.files)
    for pattern, new in edits:
        before, files = files, {name: re.sub(pattern, new, text) for name, text in files.items()}
        assert files != before, f"{pattern} is in no file"
    other = copy.copy(program)
    other.__dict__["files"] = files
    return other


@cache
def program_of(plan: str) -> CompiledProgram:
    if plan == "neurons":
        return compiled(chain(3, 4).model, *batch_of(plan, 4), F.cross_entropy, 3, "independent_subnets(local_steps=1)")
    program = planned(*PLANS[plan], norm=True)
    if plan == "replicas":  # so small a model has one bucket
        return edited(program, (("\n\n\ndef step", "\n\nBUCKETS = BUCKETS[0][:3], BUCKETS[0][3:]\n\n\ndef step"),))
    return program


def batch_of(plan: str, examples: int) -> tuple[Tensor, Tensor]:
    return images(examples) if plan in PLANS else (torch.randn(examples, INPUTS), torch.randint(CLASSES, (examples,)))


def run(plan: str, broken: CompiledProgram, ranks: tuple[int, ...], use: Use, folder: Path) -> None:
    """Let all ranks train the plan, some of them with a broken program."""
    program = program_of(plan)
    batch = batch_of(plan, program.plan.global_batch)

    def each(transport: Transport) -> None:
        worker = worker_of(broken if transport.rank in ranks else program, transport)
        use(worker, part_of(worker, batch, program.plan.local_batches), folder)

    on_ranks(program.plan.world, each)


@cache
def ends_unbroken(plan: str, folder: Path) -> bool:
    run(plan, program_of(plan), (), train, folder)
    return True


@sampled("name", DAMAGED, one_in=4, whole=True)
def test_a_rank_that_does_something_else_is_named_with_what_the_others_wait_for(name: str, tmp_path: Path) -> None:
    damage = DAMAGED[name]
    broken = edited(program_of(damage.plan), damage.edits)
    with strict_transports():
        assert ends_unbroken(damage.plan, tmp_path.parent)
        with pytest.raises((Deadlock, Mismatch), match=damage.words):
            run(damage.plan, broken, damage.ranks, damage.use or train, tmp_path)
    if damage.ends:
        run(damage.plan, broken, damage.ranks, train, tmp_path)


def test_messages_in_both_directions_pass_each_other_in_queues_of_nccl(tmp_path: Path) -> None:
    damage = DAMAGED["sends that cross"]
    with queued_transports():
        run(damage.plan, program_of(damage.plan), (), train, tmp_path)
        run(damage.plan, edited(program_of(damage.plan), damage.edits), damage.ranks, train, tmp_path)


@pytest.mark.parametrize(
    "name", ["receives from two ranks in another order", "groups in a circle", "a send that is missing"]
)
def test_what_waits_in_one_queue_does_not(name: str, tmp_path: Path) -> None:
    damage = DAMAGED[name]
    with queued_transports(), pytest.raises(Deadlock, match=r"rank 0 waits: (.|\n)*rank 2 waits: "):
        run(damage.plan, edited(program_of(damage.plan), damage.edits), damage.ranks, train, tmp_path)
