"""What reads input: each kind has a strategy of inputs, and a function that runs splitc on one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tomli_w
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from benchmarks.fuzz import junk, models
from benchmarks.fuzz.junk import PAYLOADS, mutated, shell_words, torn
from splitc.capture.example.example import Example
from splitc.cli.compiling import _settings
from splitc.cli.diffing import diff
from splitc.cli.names import check_names
from splitc.cli.options import parse
from splitc.cli.plan_file import read_plan_file
from splitc.compiled import CompiledProgram
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import SplitcError
from splitc.ir.cluster_file import to_data
from splitc.ir.plan import Plan
from splitc.passes.analysis import analyse
from splitc.report.what_if import advice_seconds
from splitc.runtime.checkpoints.manifest import MANIFEST, Manifest, checksum
from splitc.runtime.transport.distributed import init, rank_among, seconds_to_wait, started_world
from splitc.runtime.transport.simulated import run_ranks
from splitc.runtime.worker import Worker
from splitc.specialise import Settings, specialise
from tests.support.ranks import worker_of

STRATEGIES = (
    "data_parallel",
    "single_device",
    "modulo_shard(mp=2)",
    "layer_separation(n_c=2, n_f=1)",
    "parameter_server(servers=1)",
    "local_sgd(period=4)",
    "late_multiply",
    "hybrid_single",
    "independent_subnets(period=2)",
)


class Net(nn.Module):
    """A convolution and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc1, self.fc2 = nn.Conv2d(1, 2, 3), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.fc2(F.relu(self.fc1(self.conv(images).flatten(1))))
        return scores


@dataclass(frozen=True)
class Kind:
    """A kind of input.  share: of all examples."""

    name: str
    share: float
    inputs: st.SearchStrategy[Any]
    run: Callable[[Any], object]


class Subjects:
    """All kinds, on one model that is analysed once.  folder: where they may write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        self.model, self.batch = Net(), (torch.randn(4, 1, 4, 4), torch.randint(3, (4,)))
        self.example = Example.bind(self.model, (self.batch[0],), self.batch[1], F.cross_entropy)
        self.program = analyse(self.model, self.example, name="Net")
        self.cluster = load_cluster("v100-10gbe")

    def kinds(self) -> list[Kind]:
        """The kinds, the quick ones with the most examples."""
        clusters = [to_data(load_cluster(name)) for name in ("v100-10gbe", "rtx3090-1gbe")]
        clusters += [{**each, "unlike": [{"ranks": [1], "link": {"bandwidth": 1e8}}]} for each in clusters]
        started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        variables = st.tuples(
            st.sampled_from(({}, started)), st.dictionaries(st.sampled_from(_VARIABLES), shell_words, max_size=3)
        ).map(lambda both: {**both[0], **both[1]})
        return [
            Kind(
                "cluster",
                0.26,
                mutated(clusters).map(_toml) | torn([_toml(each) for each in clusters]),
                self.read_cluster,
            ),
            Kind("plan", 0.26, junk.json_texts([json.loads(each) for each in self.plans]), self.read_plan),
            Kind("diff", 0.05, junk.json_texts([json.loads(each) for each in self.plans]), self.diff),
            Kind("options", 0.2, _COMMANDS, self.options),
            Kind("model file", 0.01, models.model_files(), lambda text: models.inspect(self.folder, text)),
            Kind("compile", 0.01, models.arguments, lambda given: models.compile_with(self.model, self.batch, given)),
            Kind("names", 0.01, models.names, models.compile_named),
            Kind("request", 0.02, _REQUESTS, self.request),
            Kind("batch", 0.08, _BATCHES, self.step),
            Kind("checkpoint", 0.04, st.tuples(st.integers(0, 5), torn(self.files), st.booleans()), self.resume),
            Kind("environment", 0.05, variables, self.environment),
            Kind("API", 0.02, models.calls, lambda call: models.call(self.run_of_one, self.cluster, self.batch, call)),
        ]

    @cached_property
    def plans(self) -> list[str]:
        """The texts of valid plans, of all strategies on three or four ranks."""
        found = []
        for text in STRATEGIES:
            with contextlib.suppress(SplitcError):
                world = 3 if "separation" in text or "server" in text else 4
                found.append(self._lowered(Settings(world, cluster=self.cluster, strategy=text)).plan.to_json())
        return found

    def _lowered(self, settings: Settings, plan: Plan | None = None) -> Any:
        return specialise(self.program, settings, plan)

    # -- files ---------------------------------------------------------------------------------------------------------

    def read_cluster(self, data: bytes) -> None:
        path = self.folder / "cluster.toml"
        path.write_bytes(data)
        load_cluster(path, learns=False)

    def read_plan(self, data: bytes) -> None:
        path = self.folder / "plan.json"
        path.write_bytes(data)
        plan = read_plan_file(path)
        if plan.world <= 8:
            self._lowered(Settings(plan.world, cluster=self.cluster), plan)

    def diff(self, data: bytes) -> None:
        (self.folder / "a.json").write_bytes(data)
        (self.folder / "b.json").write_text(self.plans[0])
        with contextlib.redirect_stdout(io.StringIO()):
            diff(parse(["diff", str(self.folder / "a.json"), str(self.folder / "b.json")]))

    @cached_property
    def run_of_one(self) -> CompiledProgram:
        """A program of one rank, which runs in this thread."""
        settings = Settings(1, cluster=self.cluster, strategy="data_parallel")
        return CompiledProgram(self._lowered(settings), self.model, self.example, settings)

    @cached_property
    def files(self) -> list[bytes]:
        """The files of a checkpoint."""

        def save(worker: Worker) -> None:
            for _ in range(2):
                worker.step(*self.batch)
                worker.save(self.folder / "whole")

        self._on_one(save)
        self.names = sorted(path.name for path in (self.folder / "whole" / "step-000002").iterdir())
        return [(self.folder / "whole" / "step-000002" / name).read_bytes() for name in self.names]

    def _on_one(self, call: Callable[[Worker], None]) -> None:
        """Call with the worker of a world of one; raises its error."""
        problems: list[Exception] = []

        def run(transport: Any) -> None:
            try:
                call(worker_of(self.run_of_one, transport, optimizer=torch.optim.Adam))
            except Exception as error:
                problems.append(error)

        run_ranks(1, run)
        for problem in problems:
            raise problem

    def resume(self, given: tuple[int, bytes, bool]) -> None:
        """A file of the newest checkpoint is another one; signed: its checksum is right."""
        which, data, signed = given
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self.folder / "whole", run)
        path = run / "step-000002" / self.names[which % len(self.names)]
        manifest = Manifest.of(path.parent)
        path.write_bytes(data)
        if signed and manifest is not None and path.name != MANIFEST:
            Manifest(manifest.run, manifest.start, {**manifest.files, path.name: checksum(path)}).write(path.parent)
        self._on_one(lambda worker: print(worker.resume(run), file=io.StringIO()))

    # -- arguments -----------------------------------------------------------------------------------------------------

    def options(self, argv: list[str]) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                args = parse(argv)
            except SystemExit:  # --help
                return
            check_names(args)
            if "strategy" in vars(args):
                _settings(args)

    def request(self, given: dict[str, Any]) -> None:
        lowered = self._lowered(Settings(**{"cluster": self.cluster, **given}))
        for name, text in CompiledProgram(lowered, self.model, self.example, Settings(given["world"])).files.items():
            if name.endswith(".py"):
                compile(text, name, "exec")

    def step(self, batch: Any) -> None:
        self._on_one(lambda worker: batch[0](worker, self.batch, batch[1]))

    def environment(self, given: dict[str, str]) -> None:
        with patch.dict(os.environ, {**given, "SPLITC_TIMEOUT": given.get("SPLITC_TIMEOUT", "1e-3")}):
            for read in (seconds_to_wait, started_world, lambda: rank_among(2), advice_seconds):
                read()
            with _silent():
                init(2)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without what C++ writes on stderr: torch's store a page for each port where nobody is."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


_VARIABLES = (
    *("SPLITC_TIMEOUT", "SPLITC_ADVICE", "SPLITC_CACHE", "RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"),
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "XDG_CACHE_HOME"),
)

_FLAGS = (
    *("--world", "--cluster", "--strategy", "--microbatches", "--pin", "--accumulate", "--global-batch", "--memory"),
    *("--autocast", "--wire", "--wire-error", "--input", "--plan", "--json", "--all", "-q", "-o", "--costs", "--hosts"),
    *("--budget", "--ranks", "--steps", "--bandwidth", "--strategies", "--against", "--trace", "--dtype"),
)
_VALUES = st.one_of(
    shell_words,
    st.sampled_from(STRATEGIES),
    st.tuples(st.sampled_from(STRATEGIES), shell_words).map(lambda both: both[0].replace("=", f"={both[1]},")),
    st.tuples(shell_words, st.sampled_from(("role", "holding", "sync", "group", "split", "x")), shell_words).map(
        lambda parts: f"{parts[0]}={parts[1]}:{parts[2]}"
    ),
    st.sampled_from(("v100-10gbe", "2", "4", "16GB", "bf16", "activations=int8", "1e-2", "4x1x4x4", "conv=fc", "5:80")),
)
PAIRS = st.tuples(st.sampled_from(_FLAGS), _VALUES).map(lambda pair: [*pair])
_COMMANDS = st.tuples(
    st.sampled_from(
        ("inspect", "explain", "compile", "simulate", "diff", "verify", "tune", "clusters", "example", "run")
    ),
    st.sampled_from((["net.py"], ["net.py", "--world", "2", "--cluster", "v100-10gbe"], [])),
    st.lists(PAIRS | shell_words.map(lambda word: [word]), max_size=4),
).map(lambda parts: [parts[0], *parts[1], *(word for pair in parts[2] for word in pair)])

_REQUESTS = st.fixed_dictionaries(
    {"world": st.integers(1, 6), "strategy": st.sampled_from(("auto", *STRATEGIES))},  # auto takes longest
    optional={
        "global_batch": st.sampled_from((1, 2, 5, 8, 64, 10**9)),
        "memory": st.sampled_from((1.0, 1e3, 1e4, 2e4, 1e5, 1e9)),
        "accumulate": st.integers(1, 4),
        "pins": st.dictionaries(
            st.sampled_from(("conv", "fc1", "fc*", "*", "nothing")),
            st.sampled_from(("conv", "fc", "trunk", "head", "all", *PAYLOADS[:2])),
            max_size=2,
        ),
    },
)

_OTHER = st.one_of(
    junk.junk,
    st.sampled_from((torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64)),
    st.lists(st.integers(0, 5), max_size=5),
)


def _step(worker: Worker, batch: tuple[torch.Tensor, ...], given: Any) -> None:
    """A step with an input of another dtype, of other sizes, or something else."""
    images, target = batch
    if isinstance(given, torch.dtype):
        worker.step(images.to(given), target)
    elif isinstance(given, list) and all(type(each) is int and 0 <= each < 6 for each in given):
        worker.step(torch.randn(given), target)
    else:
        worker.step(given)


def _targets(worker: Worker, batch: tuple[torch.Tensor, ...], given: Any) -> None:
    target = (
        torch.full(given, 2) if isinstance(given, list) and all(type(n) is int and n >= 0 for n in given) else given
    )
    worker.step(batch[0], target)


def _nested(worker: Worker, batch: tuple[torch.Tensor, ...], given: Any) -> None:
    worker.step({"images": batch[0], str(given): given}, [batch[1]])


def _evaluated(worker: Worker, batch: tuple[torch.Tensor, ...], given: Any) -> None:
    worker.evaluate(batch[0], given)
    worker.predict(given)


def _sized(worker: Worker, batch: tuple[torch.Tensor, ...], given: Any) -> None:
    worker.use_sizes(given)
    worker.step(*batch)


def _right(worker: Worker, batch: tuple[torch.Tensor, ...], given: Any) -> None:
    """A valid step, of other numbers in another layout, and as many examples as it may have elsewhere."""
    number, scale, layout, seed = given
    torch.manual_seed(seed)
    images = (scale * torch.randn_like(batch[0])).to(memory_format=layout)
    loss = worker.step(images, torch.randint(3, (len(images),)))
    assert loss.isfinite()
    assert len(worker.predict(images)) == len(images)
    worker.use_sizes([number])
    worker.step(images[:number], batch[1][:number])
    worker.evaluate(images[:number], batch[1][:number])


_VALID = st.tuples(
    st.integers(1, 4),
    st.sampled_from((0.0, 1e-3, 1.0, 1e3)),
    st.sampled_from((torch.channels_last, torch.contiguous_format)),
    st.integers(0, 2**31),
)
_WRONG = st.tuples(st.sampled_from((_step, _targets, _nested, _evaluated, _sized)), _OTHER)
_BATCHES = st.one_of(_WRONG, st.tuples(st.just(_right), _VALID))


def _toml(data: Any) -> bytes:
    """A cluster file, as far as TOML has such values."""
    with contextlib.suppress(Exception):
        return tomli_w.dumps(data).encode("utf-8", "surrogatepass")
    return repr(data).encode("utf-8", "surrogatepass")
