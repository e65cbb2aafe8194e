"""A model compiled for the ranks of a cluster, as users hold it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, fx, nn

from splitc.bounded import bounded
from splitc.capture.example.example import Example
from splitc.capture.validate.behind import Behind
from splitc.codegen.build_folder import FIGURES, TIMELINE
from splitc.codegen.generate import generate
from splitc.codegen.rank_weights import rank_weights
from splitc.codegen.save import require_importable, save_build
from splitc.cost_models.calibration.calibrate import require_described
from splitc.cost_models.clusters.named import is_this_machine
from splitc.errors import LaunchError
from splitc.ir.autocast import autocast_for
from splitc.ir.decode import Count, Limit, Seed, typed
from splitc.ir.fake_mode import few_objects
from splitc.ir.pass_manager import Watcher
from splitc.ir.plan import Plan
from splitc.ir.printer import rank_graph
from splitc.ir.program import LoweredProgram, Program
from splitc.ladder import Rung, ladder
from splitc.passes.analysis import analyse
from splitc.report.drift import expected
from splitc.report.figures import of_plan
from splitc.report.html.head import head
from splitc.report.step import of_program
from splitc.report.text import report, tried
from splitc.runtime.launch.loader import of_rank_0
from splitc.runtime.parameter_groups import OptimizerFactory
from splitc.runtime.transport.base import Transport
from splitc.runtime.transport.distributed import rank_among
from splitc.runtime.transport.meeting import Call, join, refusals_told
from splitc.runtime.weights import first_names
from splitc.runtime.worker import Worker
from splitc.specialise import Settings, inserts_norm, specialise, with_norms
from splitc.tuned import Request, tuned
from splitc.verify.batches import few_of, scaled_down
from splitc.verify.borrowed import Floating, borrowed
from splitc.verify.rounding import Rounding, rounding
from splitc.verify.verify import Verification, verify_program

_MAKES = "that makes the optimizer of the parameters that a rank has, as lambda params: SGD(params, lr=0.1)"
Factory = Annotated[OptimizerFactory, Limit(callable, _MAKES)]
_MOST_OF_TIMELINE = 2_000  # ranks times layers


def compile_example(
    model: nn.Module,
    example: Example,
    settings: Settings,
    *,
    name: str | None = None,
    plan: Plan | None = None,
    watch: Watcher | None = None,
    evaluation: bool = True,
) -> CompiledProgram:
    """`compile` for a bound example; of several ranks, only rank 0 does so before the program is read."""
    settings = replace(settings, autocast=autocast_for(settings.autocast, plan))
    analysed = partial(analyse, name=name, watch=watch, autocast=settings.autocast, code=settings.code)

    traced: list[Program] = []

    def program(behind: Behind | None = None) -> LoweredProgram:
        with few_objects():
            traced[:] = [analysed(model, example, evaluation=evaluation, behind=behind)]
            return with_formats(settings, model, example, lambda asked: specialise(traced[0], asked, plan, watch))

    world = settings.world if plan is None else plan.world
    if plan is None and is_this_machine(settings.cluster) and rank_among(world, alone=-1) >= 0:
        require_described("splitc.compile of an example")
    waits = watch is None and rank_among(world) > 0  # for the files of rank 0, in `worker`
    if inserts_norm(settings, plan) and not waits:
        model = with_norms(model, analysed(model, example, evaluation=False), world)
    behind = None if waits else Behind()
    first = program if waits else program(behind)
    if behind is not None:
        behind.start()
    before = partial(analysed, model, example, evaluation=evaluation)
    asked = model, example, replace(settings, world=world), behind, program
    return CompiledProgram(first, *asked, lambda: traced[0] if traced else before(), plan)


def with_formats(
    settings: Settings, model: nn.Module, example: Example, made: Callable[[Settings], LoweredProgram]
) -> LoweredProgram:
    """The program that is made for settings, with formats on the wire where they are to be chosen."""

    def measure(each: LoweredProgram, batches: int) -> Rounding:
        weights = CompiledProgram(each, model, example, settings).weights()
        return rounding(each, model, example, weights, each.plan.local_batches, batches)

    return bounded(settings, made, measure) if settings.free else made(settings)


class CompiledProgram:
    """A model compiled for the ranks of a plan; where `program` is a function, when it is first read.

    behind: what is still being validated.  anew: compiles once more, and validates first.  analysed: what plans are
    made of.  given: the plan to follow.
    """

    def __init__(
        self,
        program: LoweredProgram | Callable[[], LoweredProgram],
        model: nn.Module,
        example: Example,
        settings: Settings,
        behind: Behind | None = None,
        anew: Callable[[], LoweredProgram] | None = None,
        analysed: Callable[[], Program] | None = None,
        given: Plan | None = None,
    ) -> None:
        self._program, self._model, self._example, self._settings = program, model, example, settings
        self._behind, self._anew, self.given = behind, anew, given
        self._rungs: dict[int, Rung] = {}
        self.call = Call()
        self.analysed = analysed or partial(analyse, model, example)

    @cached_property
    def program(self) -> LoweredProgram:
        """The program of each role."""
        return self._program if isinstance(self._program, LoweredProgram) else self._program()

    @property
    def plan(self) -> Plan:
        """The plan, a frozen dataclass; `.candidates` holds the best plan of every strategy, priced."""
        return self.program.plan

    @cached_property
    def files(self) -> dict[str, str]:
        """The generated programs: file name -> text."""
        return generate(self.program)

    def validated(self) -> CompiledProgram:
        """Wait until the capture is validated.  Raises CaptureError; `plan` may be another one then."""
        if self._behind is not None and self._anew is not None and not self._behind.wait():
            self.program = self._anew()
            self.__dict__.pop("files", None)
        self._behind = None
        return self

    @property
    def verdict(self) -> str:
        """A sentence: what validation has found, or that it is not known yet."""
        if self._behind is None or self._behind.holds:
            return "Validated: the captured graph computes what the model does."
        return "Not validated yet: what saves, verifies or trains the program waits for that."

    def report(self) -> str:
        """The placement table and the predicted costs, for an 80-column terminal; the last line is `verdict`."""
        return f"{report(self.program)}\n{self.verdict}\n"

    def _repr_html_(self) -> str:
        """What a notebook shows: the head of the page."""
        return head(of_plan(self.plan, self.program.name))

    @typed
    def rank(self, rank: int) -> fx.GraphModule:
        """The graph of one rank, with communication nodes, annotated with the shapes at its batch size."""
        if not 0 <= rank < self.plan.world:
            raise LaunchError(f"there is no rank {rank} in a world of {self.plan.world}")
        return rank_graph(self.program, rank)

    @typed
    def verify(
        self,
        processes: bool = False,
        steps: Count = 3,
        dtype: Floating | None = None,
        examples: Count | None = None,
        seed: Seed = 0,
        compile_stages: bool | str = False,
    ) -> Verification:
        """Train `steps` steps on the ranks here and in one process, and compare loss, gradients and parameters.

        processes: start ranks under torchrun instead of simulating them.  dtype: torch.float64 proves the algebra; any
        dtype turns autocast off; None: the model's own.  examples: at most so many for each reader; None: 8.
        compile_stages: of the ranks' workers.
        """
        self.validated()
        if processes:
            require_importable(self.program, "verify(processes=True)")
        sizes = few_of(self.program) if examples is None else scaled_down(self.plan.local_batches, examples)
        with borrowed(self._model, self._example.loss, dtype):
            compiled = self if dtype is None else self._in_dtype(dtype)
            parts = compiled.program, compiled.files, compiled._model, compiled._example, compiled.weights()
            result = verify_program(
                *parts, sizes, processes=processes, steps=steps, seed=seed, compile_stages=compile_stages
            )
        was_off = self.program.autocast is not None and dtype is not None
        return replace(result, notes=(*result.notes, *["autocast was off on both sides"] * was_off))

    @typed
    def ladder(self, min_world: int) -> list[Rung]:
        """The plans for fewer ranks, one by one down to `min_world`, and what they cost; each is made once."""
        return ladder(self.validated().request, min_world, self._rungs)

    @typed
    def save(self, folder: str | Path, standalone: bool = False, min_world: int | None = None) -> Path:
        """Write the scripts, launch.py, plan.json and weights.pt; builds of `ladder(min_world)` into folder/worlds/N.

        Raises LaunchError when the folder holds something that splitc did not write, or when own code cannot be
        imported by the scripts.
        """
        require_importable(self.validated().program, "save()")
        rungs = self.ladder(min_world) if min_world is not None else ()
        worlds = {each.world: generate(each.program) for each in rungs if each.program is not None}
        spans, size = self.plan.prediction.spans, self.plan.world * len(self.program.layers)
        known = {TIMELINE: json.dumps([*map(astuple, spans())])} if spans and size <= _MOST_OF_TIMELINE else {}
        if size <= _MOST_OF_TIMELINE:
            known[FIGURES] = json.dumps(of_program(self.program))
        return save_build(Path(folder), {**self.files, **known}, self.weights(), standalone, worlds)

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """The contents of weights.pt: `state`, the model's state_dict, and `extra`, tensors that are not in it."""
        return self.request.weights(self.program)

    @typed
    def worker(
        self,
        optimizer: Factory,
        clip_norm: float | None = None,
        accumulate: int | None = None,
        seed: int = 0,
        backend: str | None = None,
        device: str | None = None,
        **options: Any,
    ) -> Worker:
        """Make the worker of this process, inside torchrun.  Collective: all use the programs and weights of rank 0.

        Its arguments are those of `Worker`; backend: of torch.distributed; device: "cpu" or "cuda", None: the GPUs,
        where torch sees any.
        """
        with refusals_told(self._settings.world, self.call):
            self.validated()
        transport = join(self._settings.world, backend, device, self.call)
        options |= {"clip_norm": clip_norm, "accumulate": accumulate, "seed": seed}
        keys = transport.broadcast_object(first_names(self._model.state_dict()))
        make = partial(Worker, keys=keys, optimizer=optimizer, **options)
        return self.worker_on(transport, make)

    def worker_on(self, transport: Transport, make: Callable[..., Worker]) -> Worker:
        """The worker of this rank, after tuning where that was asked for.  Collective.

        make: a Worker with all arguments but program, transport and weights.
        """
        if self._settings.tune:
            trial = partial(make, check_finite=False, live=False)
            plan, program = tuned(self.request, transport, trial, self._settings.tune)
            self._settings = settings = replace(self._settings, tune=0.0)
            vars(self).pop("program", None), vars(self).pop("files", None)
            self._program = program or (lambda: specialise(self.analysed(), settings, plan))
            if program is not None:
                print(tried(program.plan), flush=True)
        program, held = of_rank_0(transport, lambda: (self.files, self.parts()), self.request.own)
        return self.followed(make(program, transport, held))

    def followed(self, worker: Worker) -> Worker:
        """The worker, which on rank 0 knows what its steps should take."""
        if worker.live is not None and worker.rank.index == 0:
            own = self._settings.cluster
            source = own if isinstance(own, str | Path) else None
            place = replace(self._settings, wire=self.plan.wire).place
            worker.live.expected = expected(self.program, self.analysed, place, source)
        return worker

    def of(self, program: LoweredProgram) -> CompiledProgram:
        """The same model compiled into another program, a finalist."""
        return CompiledProgram(program, self._model, self._example, self._settings)

    @property
    def request(self) -> Request:
        """What its plan was asked for."""
        asked = self._settings, self._model, self._example, self.given
        return Request(lambda: self.program, lambda: self.analysed(), *asked)

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """The initial weights of each rank, its part of each; rank 0 also has those that no rank uses."""
        weights = self.weights()
        return rank_weights(self.program, {**weights["state"], **weights["extra"]})

    def _in_dtype(self, dtype: torch.dtype) -> CompiledProgram:
        """The same plan for the model, which was given another precision, without autocast."""
        example, plan = replace(self._example.to(dtype), loss=self._example.loss), replace(self.plan, model="")
        settings = replace(self._settings, autocast=None, cluster=None, free=())
        made = compile_example(self._model, example, settings, name=self.program.name, plan=plan, evaluation=False)
        return made.validated()
