"""Train one rank: its stage, its optimizer, and the step that its generated program defines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from . import data, moments
from .averages import MovingAverages
from .clocks import StreamClock
from .compiled_stages import CompiledStages
from .errors import LaunchError, NonFiniteError
from .evaluation import Evaluation
from .failed_step import failed_step
from .features import FEATURES
from .live import Live
from .memory_format import formats
from .optimizers import STEP, Made, make_optimizers, state_of
from .parameter_groups import OptimizerFactory
from .rank import Rank
from .replicas import Replicas
from .spec import Shard, StepContext
from .stage_state import StageState
from .transport.agreement import agreed, require_equal
from .transport.base import Transport
from .transport.torch_transport import TorchTransport
from .updates import DYNAMIC, SKIP, LossScale, Updates


class Training:
    """Trains one rank; a `Worker` without data, evaluation and saved state.

    All ranks call the collective methods, in the same order; constructing it is collective too.

    program: the rank's generated module, `rankN.py`.
    weights: whole-model tensors by name, of which this rank copies what it holds, or its shards of them; on rank 0 also
    those that no rank holds, for a whole state_dict.
    keys: the keys of the model's state_dict; a mapping also gives the first key of the same tensor (`first_names`).
    optimizer: called with the named parameters of the whole model, frozen ones too.  Those that this rank does not
    update are on meta, and taken out of the optimizer's groups.  Parameters on servers are trained there: a server's
    optimizer has its rows of a parameter, under its name, a worker's has none.
    clip_norm: largest norm of all gradients of the ranks that train together, each parameter counted once.
    accumulate: batches to an update, None: as planned; gradients are the mean over them, as of losses divided by it.
    elementwise: True vouches that the optimizer updates each element from its own gradients alone; otherwise that is
    tried on small tensors where a rank has a part of the model, and the factory is called for each trial too.
    check_finite: a step whose loss or gradients are not finite updates nothing, and raises NonFiniteError everywhere;
    "skip": rank 0 says so on stderr, and the run goes on.
    ema: the weight of `averages` beside a new update, exponential moving ones of the parameters; None: none.
    loss_scale: of a program in float16, a number or "dynamic", which None is too; see `LossScale`.
    compile_stages: run stages under torch.compile where that is faster; a backend of it by name, throughout.
    check_replicas: steps after which the ranks that hold the same tensor compare it, and raise ReplicaError, all of
    them, where it differs; None: never.
    live: rank 0 says how long steps take, and why when that changes.
    """

    def __init__(
        self,
        program: Any,
        transport: Transport,
        weights: Mapping[str, Tensor],
        keys: Mapping[str, str] | Iterable[str],
        optimizer: OptimizerFactory | None,
        clip_norm: float | None = None,
        accumulate: int | None = None,
        seed: int = 0,
        elementwise: bool = False,
        check_finite: bool | str = False,
        ema: float | None = None,
        loss_scale: float | str | None = None,
        compile_stages: bool | str = False,
        check_replicas: int | None = None,
        live: bool = True,
    ) -> None:
        accumulate = program.rank.accumulate if accumulate is None else accumulate
        plan = getattr(program, "PLAN", None)
        self._settings = {"the plan": plan, "seed": seed, "accumulate": accumulate, "clip_norm": clip_norm}
        others = {"check_finite": check_finite, "ema": ema, "loss_scale": loss_scale, **formats(weights)}
        others |= {"compile_stages": compile_stages, "check_replicas": check_replicas}
        require_equal(transport, {**self._settings, **others})  # before anything that ranks of another build do not do
        if type(accumulate) is not int or accumulate < 1:
            raise LaunchError(f"accumulate={accumulate!r}: give a whole number of batches, at least 1")
        self.rank = Rank(program.rank, transport, self._update)
        self._program, self._transport = program, transport
        first_names = keys if isinstance(keys, Mapping) else {key: key for key in keys}
        self._state = StageState(self.rank, program.Stage, weights, first_names)
        self.stage = self._state.stage
        self._accumulate, self._seed = accumulate, seed
        self._updates = Updates(self._state, accumulate, clip_norm, check_finite, self._loss_scale(loss_scale))
        self._steps = self._examples = 0  # of the run, and of the batches that are accumulated to the next update
        self._sizes: tuple[int, ...] | None = None
        self._is_tail = False  # whether a loader gave them, which may leave ranks without examples
        self.batch_offsets: tuple[int, ...] = program.rank.batch_offsets
        self._evaluation = Evaluation(self.rank, self._state, program)
        rank, loss = self.rank, self._evaluation.loss_anew
        own = moments.Training(program, rank.spec, self.stage, rank.parts, rank.step, loss)
        self._features = [feature(own) for feature in FEATURES if feature.concerns(rank.spec)]
        if compile_stages:
            self._features.append(CompiledStages(own, transport, compile_stages))
        with agreed(transport, "make its optimizer"):
            self._optimizers, self._scheduled, self._groups = self._make_optimizers(optimizer, elementwise)
            self._averages = None if ema is None else self._moving_averages(ema)
        for comm in self.rank.comms:
            comm.shared.optimizer_state = partial(state_of, self._optimizers)
        own_replicas = self.rank, self._state, self._optimizers, self._features
        clock = StreamClock(transport.device) if transport.device.type == "cuda" else None
        follows = live and transport.world > 1 and isinstance(transport, TorchTransport)
        self.live = Live(transport, clock=clock) if follows else None
        self._replicas = None if check_replicas is None else Replicas(check_replicas, *own_replicas)
        transport.watch(self)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this rank's parameters; None where nothing is trained."""
        return self._optimizers.get(STEP)

    @property
    def shards(self) -> Mapping[str, Shard]:
        """Parameter -> the part of it that this rank holds; the whole of all others."""
        return self._state.shards

    @property
    def device(self) -> torch.device:
        """Where this rank computes, and where losses and outputs are."""
        return self._transport.device

    @property
    def data_rank(self) -> int | None:
        """The position of this rank among those that read data; None where it reads none."""
        return self.rank.spec.data_rank

    @property
    def data_world(self) -> int:
        """How many ranks read data."""
        return len(self.rank.spec.readers)

    @property
    def cycle(self) -> tuple[int, int]:
        """The steps in which all happens that a plan does, an update or a round, and those made of them."""
        updates, made = max((feature.cycle for feature in self._features), default=(1, 0))
        return updates * self._accumulate, made * self._accumulate + self._steps % self._accumulate

    def step(self, *batch: Any, **named: Any) -> Tensor:
        """Train on one global batch.  batch: this rank's examples, inputs, then targets; nothing where it reads none.

        Inputs may be given by name, as a dict or as arguments; nested ones as the model takes them, or as their tensors
        in order.

        Returns the global loss, the same on every rank; within a round that of the ranks that train together.
        Collective.
        Raises LaunchError when the batch does not fit; then nothing has been sent, and a right batch may follow.
        """
        if self.live is not None:
            self.live.begin()
        batch = self._checked((*batch, named) if named else batch)
        position = self._steps % self._accumulate
        is_first, is_last = position == 0, position == self._accumulate - 1
        if is_first:
            for parameter in self._state.leaves:
                parameter.grad = None
            self._examples = 0
        context = self._context(True, is_first, is_last)
        self._evaluation.alike = False
        self._updates.begin()
        with failed_step(self._program, self._steps + 1), self.rank.step(context) as comms:
            for feature in self._features:
                feature.begin(comms)
            loss: Tensor = self._program.step(*comms, self.stage, *self.rank.on_device(batch))
            self.rank.after_backward(self.stage, self._state.added if is_last else {})
            for feature in self._features:
                feature.after_backward(context)
            is_wrong = self._updates.finish(loss, is_last)
        for buffer, value in context.stored if not is_wrong else ():
            buffer.copy_(value)
        if is_wrong:
            self._updates.undo()
            self._not_finite(self._updates.error(self._steps + 1, loss), position)
        self._steps += 1
        self._examples += self.batch_offsets[-1]
        if is_last and not self._updates.overflow:
            if self.optimizer is not None:
                self.optimizer.step()
            if self._averages is not None:
                self._averages.update()
        for feature in self._features:
            feature.after_update((batch, context))
        if self._replicas is not None:
            self._replicas.after(self._steps)
        if self.live is not None:
            self.live.after()
        return loss

    def end_round(self) -> None:
        """End a running round of local updates now: the ranks exchange what they trained.  Collective.

        The plan's rounds end by themselves; so does one that is running when the state is saved, loaded or evaluated.
        Raises LaunchError for subnets while accumulated batches wait for their update: their gradients are of slices.
        """
        for feature in self._features:
            feature.end(self._context(training=True), self._steps % self._accumulate)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the last update, of the parameters or parts of them (`shards`) that this rank updates.

        A tied parameter's gradient stands under each of its names.
        """
        return self._state.gradients()

    def grad_norm(self) -> Tensor:
        """The norm of the last update's gradients, over the ranks that train together and before clipping.  Collective.

        Each parameter counts once.  It is computed where it is asked for, or with `clip_norm`.
        """
        return self._updates.norm()

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward; 1 where it is not scaled."""
        return self._updates.loss_scale

    @property
    def averages(self) -> dict[str, Tensor]:
        """The averages of the parameters, or parts of them, that this rank updates, by name; none without `ema`."""
        return {} if self._averages is None else self._averages.tensors

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While this holds, the parameters are their averages: to evaluate, predict, export or read the state.

        Raises LaunchError without `ema`, or while accumulated batches wait for their update.
        """
        if self._averages is None:
            raise LaunchError("there are no averages: give ema=0.999, say, to the worker")
        if self._steps % self._accumulate:
            raise LaunchError(
                f"{self._steps % self._accumulate} accumulated batches wait for their update; take averages after it"
            )
        with self._averages.in_use():
            yield

    def use_sizes(self, sizes: Iterable[int] | None) -> None:
        """Set how many examples each reader gives to the next steps; None: as compiled.  The same on every rank."""
        given = sizes if sizes is None or isinstance(sizes, Iterable) else [sizes]
        self._sizes = None if given is None else tuple(given)
        if not all(isinstance(size, int) for size in self._sizes or ()):
            raise LaunchError(f"sizes are {sizes!r:.60}; give a whole number of examples for each reader")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _not_finite(self, error: NonFiniteError, position: int) -> None:
        """Raise the error of a step, of those of an update at this position, or say on rank 0 that it is left out."""
        if self._updates.check_finite != SKIP:
            self._steps -= position  # the update begins anew
            raise error
        if self.rank.index == 0:
            print(f"left out: {error}", file=sys.stderr, flush=True)

    def _make_optimizers(self, factory: OptimizerFactory | None, elementwise: bool) -> Made:
        if factory is None:
            return {}, None, []
        state, roles = self._state, self.rank.spec.roles
        every = {role.role: role.updated_every_microbatch for role in roles if role.updated_every_microbatch}
        if every and (self._accumulate > 1 or self._updates.clip_norm is not None):
            raise LaunchError("updates in every microbatch leave nothing to accumulate, and no global norm to clip")
        if every and (self._updates.check_finite or self._updates.scale):
            raise LaunchError("updates in every microbatch are made before it is known whether the step is finite")
        named = [(state.first_name(name), parameter) for name, parameter in state.trained]
        for feature in self._features if not elementwise else ():
            feature.check_optimizer(factory, state.whole, named)
        by_first = {role: {state.first_name(name) for name in names} for role, names in every.items()}
        divided = [state.first_name(name) for name in state.divided]
        return make_optimizers(factory, named, state.whole, by_first, divided, elementwise or state.is_whole)

    def _loss_scale(self, given: float | str | None) -> LossScale | None:
        if self.rank.spec.scales_loss:
            return LossScale(DYNAMIC if given is None else given)
        if given is not None:
            raise LaunchError(
                f"loss_scale={given!r}: the program does not run in float16; compile with autocast=torch.float16"
            )
        return None

    def _moving_averages(self, decay: float) -> MovingAverages:
        for why in (feature.own_parameters for feature in self._features if feature.own_parameters):
            raise LaunchError(f"ema: {why}; leave it out")
        return MovingAverages(decay, self._state.trained)

    def _update(self, role: str) -> None:
        """Update the parameters of a role that is updated after every microbatch."""
        if (optimizer := self._optimizers.get(role)) is not None:
            optimizer.step()
            optimizer.zero_grad()

    def _context(self, training: bool, is_first: bool = True, is_last: bool = True) -> StepContext:
        """Of the next step, whose batch was checked."""
        number, before = self._steps // self._accumulate, self._examples if training else 0
        own = self._seed, number, training, is_first, is_last, before
        context = StepContext(self.rank.spec.batch_offsets, self.batch_offsets, *own, loss_scale=self.loss_scale)
        return reduce(lambda context, feature: feature.describe(context), self._features, context)

    def _checked(self, batch: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The tensors of a batch, inputs first; note where the readers' examples begin in it.

        Raises LaunchError when a step cannot take it.
        """
        self.batch_offsets = self.rank.batch_offsets(self._sizes, self._is_tail)
        return data.checked(batch, self.rank.spec, self.batch_offsets, self._transport.device)
