"""Measure one model in this process: compile, compare with eager, train under three strategies; write what was found.

The result is written after every stage, so that a process that is ended leaves what it had.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import splitc.passes.analysis
from benchmarks.real_models.case import Case, Entry, entries
from benchmarks.real_models.declare import declare
from benchmarks.real_models.eager import case_dtype, difference, without_dropout
from benchmarks.real_models.regions import Regions, regions_of
from splitc.capture.example.example import Example
from splitc.compiled import CompiledProgram
from splitc.errors import PlacementError
from splitc.ir.program import Program
from splitc.passes.analysis import analyse
from splitc.passes.planner.strategy import parse_strategy
from splitc.specialise import Settings, specialise

BATCH = 4  # examples of one rank
CLUSTER = "k80-2.6gbe"
DIVIDING = (("layer_separation", 3), ("modulo_shard", 2), ("hybrid_single", 2), ("late_multiply", 2))
STEPS = 2  # of `verify`: the second one starts from an update with momentum
EXAMPLES = 3  # of each rank in them: as many as BatchNorm needs after a pooling to 1 x 1, and one more
EXACT, CLOSE = 1e-8, 1e-3  # largest error that counts as equal, in float64 and in float32


@dataclass
class Trained:
    """`verify` under one strategy.  error: None where it did not run; what: the plan's own strategy, or why not."""

    strategy: str
    what: str
    dtype: str = ""
    error: float | None = None
    holds: bool = False


@dataclass
class Result:
    """What is known of one model.

    seconds: of CPU, for a compile under `auto`; validation: those of them in which graph and model were compared.
    error, dtype: one data-parallel step against eager.  rounding: eager against itself, in another order.
    failed: the stage that failed, and its error.  seconds_in_all: of CPU, all stages; 0 until they are done.
    """

    name: str
    package: str
    shows: str
    batched: bool
    parameters: int = 0
    seconds: float | None = None
    validation: float = 0.0
    regions: Regions = field(default_factory=Regions)
    error: float | None = None
    worst: str = ""
    dtype: str = ""
    rounding: float = 0.0
    trained: list[Trained] = field(default_factory=list)
    failed: str = ""
    why: str = ""
    notes: list[str] = field(default_factory=list)
    seconds_in_all: float = 0.0

    @property
    def captured(self) -> bool:
        """Whether it compiles."""
        return self.seconds is not None

    @property
    def equal(self) -> bool:
        """Whether a step equals that of the eager model, but for rounding."""
        exact = EXACT if self.dtype == "float64" else CLOSE
        return self.error is not None and self.error <= max(exact, min(10 * self.rounding, CLOSE))

    @property
    def trains(self) -> bool:
        """Whether it trains right under `auto` and two strategies that were asked for, one of which divides layers."""
        divides = any(t.strategy.partition("(")[0] in dict(DIVIDING) and t.holds for t in self.trained)
        return len(self.trained) >= 3 and divides and all(t.holds for t in self.trained)


def measure(name: str, entry: Entry, write: Callable[[Result], None]) -> Result:
    """All stages, until one fails."""
    begin = time.process_time()
    result = Result(name, entry.package, entry.shows, entry.batched)
    stages: list[tuple[str, Callable[[Result, Entry], None]]] = [
        ("build", _build),
        ("compile", _compile),
        ("equal eager", _compare),
        ("train", _train),
    ]
    for stage, run in stages:
        try:
            run(result, entry)
        except Exception as error:
            result.failed, result.why = stage, described(error)
            traceback.print_exc()
            break
        write(result)
    result.seconds_in_all = time.process_time() - begin
    write(result)
    return result


def described(error: BaseException) -> str:
    """Type, first lines, and for an error that is not splitc's own the last line of code it passed."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()][:2]
    text = f"{type(error).__name__}: {' '.join(lines)}"[:400]
    if type(error).__module__.startswith("splitc") and type(error).__name__ != "InternalError":
        return text
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def _made(entry: Entry, examples: int) -> Case:
    torch.manual_seed(0)
    case = entry.make(examples)
    case.module.train()
    return case


def _build(result: Result, entry: Entry) -> None:
    result.parameters = sum(p.numel() for p in _made(entry, 1).module.parameters())


def _bound(case: Case) -> Example:
    inputs, target = case.rows(slice(0, BATCH))
    return Example.bind(case.module, inputs, target, case.loss)


def _compile(result: Result, entry: Entry) -> None:
    case = _made(entry, BATCH)
    inputs, target = case.rows(slice(0, BATCH))
    with _seconds_of(splitc.passes.analysis, "validate_capture") as validation:
        begin = time.process_time()
        program = splitc.compile(case.module, 4, inputs, target, case.loss, cluster=CLUSTER)
        seconds = time.process_time() - begin
    assert isinstance(program, CompiledProgram)
    result.seconds, result.validation = seconds, sum(validation)
    result.regions = regions_of(program.program, case)


@contextmanager
def _seconds_of(module: Any, function: str) -> Iterator[list[float]]:
    """The CPU seconds of each call of a function of a module."""
    original, seconds = getattr(module, function), []

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        try:
            return original(*args, **kwargs)
        finally:
            seconds.append(time.process_time() - begin)

    setattr(module, function, timed)
    try:
        yield seconds
    finally:
        setattr(module, function, original)


def _in_float64(result: Result, entry: Entry, run: Callable[[Case], None]) -> None:
    """Run in float64, or where the model cannot, in float32."""
    try:
        case = _made(entry, 2 * BATCH).to(torch.float64)
        run(case)
        return
    except Exception as error:
        first = described(error)
    run(_made(entry, 2 * BATCH))
    result.notes.append(f"not in float64: {first}")


def _compare(result: Result, entry: Entry) -> None:
    def run(case: Case) -> None:
        case = dataclasses.replace(case, module=without_dropout(case.module))
        bound = _bound(case)
        program = analyse(case.module, bound)
        compiled = _specialised(program, case, bound, "data_parallel", 2)
        found = difference(compiled, case, BATCH)
        result.error, result.worst, result.dtype = found.largest, found.worst, _dtype(case)
        result.rounding = found.rounding

    _in_float64(result, entry, run)
    if not result.equal:
        raise AssertionError(f"{result.error:.1e} at {result.worst}, in {result.dtype}, rounding {result.rounding:.1e}")


def _train(result: Result, entry: Entry) -> None:
    def run(case: Case) -> None:
        result.trained = []
        bound = _bound(case)
        program = analyse(case.module, bound)
        _trained(result, program, case, bound, "auto", 2)
        tried = [_trained(result, program, case, bound, *strategy) for strategy in DIVIDING[:1]]
        for strategy in (*DIVIDING[1:], ("data_parallel", 2)):
            if sum(tried) < 2:
                tried.append(_trained(result, program, case, bound, *strategy))

    _in_float64(result, entry, run)
    wrong = [t for t in result.trained if not t.holds]
    if wrong:
        raise AssertionError("; ".join(f"{t.strategy}: {t.error} {t.what}" for t in wrong))


def _trained(result: Result, program: Program, case: Case, bound: Example, strategy: str, world: int) -> bool:
    """Verify one plan and keep the result; False where the model has no such plan."""
    try:
        compiled = _specialised(program, case, bound, strategy, world)
    except PlacementError as error:
        result.notes.append(f"{strategy}: {str(error).splitlines()[0]}")
        return False
    found = compiled.verify(steps=STEPS, examples=EXAMPLES)
    worst = max(found.loss_error, found.gradient_error, found.parameter_error)
    what = compiled.plan.strategy if found.holds else f"{found.where} {found.worst}"
    result.trained.append(Trained(f"{strategy}({world})", str(what), _dtype(case), worst, found.holds))
    return True


def _specialised(program: Program, case: Case, bound: Example, strategy: str, world: int) -> CompiledProgram:
    settings = Settings(world, strategy=parse_strategy(strategy), cluster=CLUSTER)
    return CompiledProgram(specialise(program, settings), case.module, bound, settings)


def _dtype(case: Case) -> str:
    return str(case_dtype(case)).removeprefix("torch.")


def measure_alone(name: str, file: Path, log: Path, nbytes: int, seconds: int) -> None:
    """Measure a model in a process made for it, which may have so much memory and CPU: result and log are files."""
    with log.open("w") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    warnings.simplefilter("ignore")
    os.environ["SPLITC_CACHE"] = "off"  # so that the seconds are those of a first compile
    torch.set_num_threads(1)
    declare()
    measure(name, entries()[name], lambda result: _write(file, result))


def _write(file: Path, result: Result) -> None:
    new = file.with_suffix(".new")
    new.write_text(json.dumps(dataclasses.asdict(result)), encoding="utf-8")
    new.replace(file)


def read(text: str) -> Result:
    """The result that `main` wrote."""
    values = json.loads(text)
    trained = [Trained(**t) for t in values.pop("trained")]
    regions = Regions(**{**values["regions"], "why": tuple(values["regions"]["why"])})
    return Result(**{**values, "regions": regions}, trained=trained)
