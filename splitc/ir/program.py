"""The Program: one training step of a model as a graph, and what is known about it.

A Program is frozen, and its type tells its stage: a captured `Program`, a `PlacedProgram` with its plan, a
`LoweredProgram` with a stage for each role.  A pass returns a new one.  A node's
`NodeInfo` (`splitc.ir.graph`) has its spec, source line, layer and role.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch
from torch import fx, nn

from splitc.ir.costs import CostLine
from splitc.ir.layers import Coupling, Layer, LossTerm, StateTensor
from splitc.ir.plan import Plan
from splitc.ir.schedule.actions import Action, RankProgram
from splitc.ir.schedule.verb import Often
from splitc.ir.schedule.verbs import SUMS, VERBS
from splitc.runtime.collectives.layouts import State, Transition
from splitc.runtime.spec import BatchGuard, DealtDims


@dataclass(frozen=True)
class TensorSpec:
    """A tensor whose size along `batch_dim` is `rows` for each example of the batch.

    `shape` is the shape at a batch of one example.  A tensor without `batch_dim` (a mask, a scalar) has the same shape
    at every batch size.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None = None
    requires_grad: bool = False

    @property
    def rows(self) -> int:
        """How many rows along `batch_dim` one example has; 0 for a tensor without a batch dimension."""
        return 0 if self.batch_dim is None else self.shape[self.batch_dim]

    def at(self, batch: int) -> tuple[int, ...]:
        """The shape at `batch` examples."""
        return tuple(n * batch if d == self.batch_dim else n for d, n in enumerate(self.shape))

    def nbytes(self, batch: int) -> int:
        """Bytes at `batch` examples."""
        return math.prod(self.at(batch)) * self.dtype.itemsize

    def template(self) -> tuple[int, ...]:
        """The shape with -1 in place of the batch dimension, as generated programs write it."""
        return tuple(-1 if d == self.batch_dim else n for d, n in enumerate(self.shape))


@dataclass(frozen=True)
class SizeSpec:
    """A whole number in the graph that depends on the batch: `scale * batch + offset`."""

    scale: int
    offset: int = 0


Spec = TensorSpec | SizeSpec | tuple["Spec", ...] | None


@dataclass(frozen=True)
class Input:
    """One input of the step, a placeholder of the graph.

    low, high: bounds of synthetic data, `high` exclusive; nested lists broadcast against the tensor; None: any float.
    bound: such a bound, where its readers imply one.  target: whether it goes to the loss.
    path: where it is in a nested argument, `("batch", "image")`; None for an argument that is a tensor.
    loose: its shape, with -2 for sizes that follow from the data, in place of those of `spec`, which a region ignores.
    """

    name: str
    spec: TensorSpec
    high: float | list[object] | None = None
    target: bool = False
    path: tuple[str, ...] | None = None
    bound: int | list[object] | None = None
    loose: tuple[int, ...] | None = None
    low: int = 0


@dataclass(frozen=True)
class Cut:
    """A value that one role computes and another one reads; its gradient takes the way back where `gradient` is set.

    name: the value's name in both generated programs.  value: the node that computes it.
    sent: whether it travels; not where both roles are the same ranks with the same examples.
    entry: how the consumer's group brings it to the state that all its readers need; None: they read it as it comes.
    arrives: in which state that group receives it.  Features return their gradient as they came; where every rank
    receives everything ("replicate"), it returns the gradient of its own examples, as after an entry.
    """

    name: str
    value: str
    producer: str
    consumer: str
    spec: TensorSpec
    gradient: bool
    sent: bool = True
    entry: Transition | None = None
    arrives: State = State.BATCH

    @property
    def gathered(self) -> bool:
        """Whether the consumer's group moves it when it has come."""
        return self.entry is not None and self.arrives is State.BATCH

    def travels(self, backward: bool) -> State:
        """In what state of the consumer's group it travels, or its gradient."""
        return State.BATCH if backward and self.arrives is State.REPLICATE else self.arrives

    def together(self, backward: bool = False) -> str:
        """The role whose ranks have all examples of their group of what travels; "": none."""
        return "" if self.travels(backward) is State.BATCH else self.consumer

    def other(self, role: str) -> str:
        """The role at the other end."""
        return self.consumer if role == self.producer else self.producer


@dataclass(frozen=True)
class Stage:
    """The part of the graph that one role runs.

    buckets: names of the parameters whose gradients are summed together, in the order in which backward fills them.
    served: likewise, of the parameters that servers hold.
    averaged: names of parameters and statistics that units average together after a round.
    fragments: of each of these buckets, the fragment of the model that it is part of.
    own_sums: parameters whose gradients are summed over all ranks of the role, not over one of each group.
    shards: parameter -> the dim along which the ranks of a group share it.
    dealt: tensor -> the neurons along its dims that are dealt to ranks in each round (independent subnets).
    forward: names of the nodes whose values its forward returns; (): those that it sends, and the loss.
    after: names of those that a method of their own computes, of what forward returned: the loss, or outputs.
    mode: ends the names of the methods that run it, where they are not those of training.
    """

    role: str
    graph: fx.Graph
    layers: tuple[str, ...]
    inputs: tuple[str, ...]
    receives: tuple[Cut, ...]
    sends: tuple[Cut, ...]
    tensors: tuple[str, ...]
    buckets: tuple[tuple[str, ...], ...] = ()
    served: tuple[tuple[str, ...], ...] = ()
    averaged: tuple[tuple[str, ...], ...] = ()
    fragments: tuple[int, ...] = ()
    own_sums: tuple[str, ...] = ()
    shards: Mapping[str, int] = field(default_factory=dict)
    dealt: Mapping[str, DealtDims] = field(default_factory=dict)
    has_loss: bool = False
    forward: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    mode: str = ""

    def cut(self, action: Action) -> Cut:
        """Return the cut that an action moves."""
        cuts = self.sends if action.verb in ("send", "recv_grad") else self.receives
        named = (cut for cut in cuts if cut.name == action.value)
        return next(cut for cut in named if not action.peer or action.peer in (cut.producer, cut.consumer))

    def sums(self, microbatch: int) -> Iterator[Action]:
        """Yield what exchanges its gradients bucket by bucket, while backward fills them."""
        for verb in SUMS.values():
            for bucket in range(len(self.buckets_of(verb))):
                yield Action(verb, role=self.role, microbatch=microbatch, bucket=bucket)

    def buckets_of(self, verb: str) -> tuple[tuple[str, ...], ...]:
        """Return the tensors that a verb exchanges, as an `all_reduce` of each bucket."""
        found: tuple[tuple[str, ...], ...] = getattr(self, VERBS[verb].buckets)
        return found

    def bucket(self, action: Action) -> tuple[str, ...]:
        """Return the tensors of an action of a bucket."""
        return self.buckets_of(action.verb)[action.bucket or 0]


@dataclass(frozen=True)
class Refusal:
    """Why there is no program: the reason with which a worker refuses to run it."""

    why: str


@dataclass(frozen=True, eq=False)
class Program:
    """A model and its loss as one captured forward graph, with the cost of each layer once it is counted.

    root: the model's modules as fake tensors (shapes without memory), under their original names.
    batch: examples in the user's example batch.  in_batch: the layer that needs the whole global batch; "": none does.
    autocast: the dtype that every stage's forward runs under.  flattened: node -> `NodeInfo.outer`, where it is not 1.
    coupled: where examples begin to depend on each other; the loss has no terms then.
    notes: sentences for the report.  guards: the batch sizes for which the branches of the trace hold.
    evaluation: the program of evaluation mode; None: it is that of training.  reads_mode: whether it may be another.
    outputs: the program of what the model returns, in place of the loss.
    part: takes examples of a batch, where the user's own function divides it.
    """

    name: str
    graph: fx.Graph
    root: nn.Module
    inputs: tuple[Input, ...]
    batch: int
    layers: tuple[Layer, ...]
    tensors: Mapping[str, StateTensor]
    loss_terms: tuple[LossTerm, ...] = ()
    coupled: tuple[Coupling, ...] = ()
    flattened: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    frozen_layers: tuple[str, ...] = ()
    in_batch: str = ""
    autocast: torch.dtype | None = None
    guards: tuple[BatchGuard, ...] = ()
    evaluation: Program | Refusal | None = None
    outputs: Program | Refusal = Refusal("")
    reads_mode: bool = True
    part: Callable[[Mapping[str, torch.Tensor], int, int], dict[str, torch.Tensor]] | None = None
    costs: Mapping[str, CostLine] = field(default_factory=dict)

    def allows(self, batch: int) -> bool:
        """Return whether the traced branches hold at a batch size."""
        return all(guard.allows(batch) for guard in self.guards)

    def layer(self, name: str) -> Layer:
        return self._layers[name]

    @cached_property
    def _layers(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def layer_of(self) -> dict[str, str]:
        """Node name -> name of its layer."""
        return {node: layer.name for layer in self.layers for node in layer.nodes}

    @cached_property
    def first_names(self) -> dict[str, str]:
        """Any name of a parameter or buffer -> its first name."""
        return {alias: tensor.name for tensor in self.tensors.values() for alias in tensor.all_names}

    def edges(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Every (value, reader) of the graph; `all_input_nodes` also sees through lists and kwargs."""
        return ((value, reader) for reader in self.graph.nodes for value in reader.all_input_nodes)

    @cached_property
    def users(self) -> Counter[str]:
        """Parameter or buffer -> how many layers use it."""
        return Counter(name for layer in self.layers for name in dict.fromkeys(layer.tensors))

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        """The modules of training, and those of an evaluation of its own."""
        return self.root, *([self.evaluation.root] if isinstance(self.evaluation, Program) else [])

    @property
    def loss(self) -> fx.Node:
        """The node of the loss, a 0-d tensor."""
        return self.graph.output_node().all_input_nodes[0]

    def placed(self, plan: Plan) -> PlacedProgram:
        """The program with a plan for it."""
        return PlacedProgram(**{each.name: getattr(self, each.name) for each in fields(Program)}, plan=plan)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedProgram(Program):
    """A program with its plan; passes insert the communication that the plan needs into its graph."""

    plan: Plan

    @cached_property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Trainable parameter -> the ranks that hold a copy, for each one that layers of several roles use.

        Each role has a copy; its gradients are summed over all of them before identical updates.
        """
        roles: dict[str, set[str]] = defaultdict(set)
        placements = self.plan.decided.placements  # the roles of one that was divided share it
        for layer in self.layers:
            for name in layer.tensors:
                roles[name].add(placements[layer.name].role)
        shared = [name for name, users in roles.items() if len(users) > 1 and self.tensors[name].trainable]
        return {name: tuple(sorted({r for role in roles[name] for r in self.plan.roles[role]})) for name in shared}

    def lowered(self, stages: tuple[Stage, ...], rank_programs: tuple[RankProgram, ...]) -> LoweredProgram:
        """The program split into the stages of its roles."""
        own = {each.name: getattr(self, each.name) for each in fields(PlacedProgram)}
        return LoweredProgram(**own, stages=stages, rank_programs=rank_programs)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoweredProgram(PlacedProgram):
    """A placed program split into one stage for each role, and one rank program for ranks of the same roles."""

    stages: tuple[Stage, ...]
    rank_programs: tuple[RankProgram, ...]

    @property
    def evaluated(self) -> LoweredProgram | Refusal:
        """The program that evaluates: this one, where no other one was lowered."""
        return self.evaluation if isinstance(self.evaluation, (LoweredProgram, Refusal)) else self

    @property
    def predicted(self) -> LoweredProgram | Refusal:
        """The program that computes what the model returns."""
        return self.outputs if isinstance(self.outputs, (LoweredProgram, Refusal)) else Refusal("")

    def stage(self, role: str) -> Stage:
        return next(stage for stage in self.stages if stage.role == role)

    def stages_of(self, rank_program: RankProgram) -> list[Stage]:
        """The stages that the ranks of a rank program run; none of a role without layers."""
        return [stage for role in rank_program.roles for stage in self.stages if stage.role == role]

    def turns(self, stage: Stage) -> int:
        """Return how often a stage runs in a step: once for each microbatch; those of groups are of the loss."""
        return self.plan.turns(stage.role) if stage.has_loss else self.plan.microbatches

    def travels_whole(self, cut: Cut) -> bool:
        """Return whether a cut moves once in a step, not by microbatch: an input, and all where the step has one."""
        return not self.plan.in_pieces or cut.value in self.stage(cut.producer).inputs

    def repeats(self, action: Action) -> bool:
        """Return whether an action is done once for each microbatch of its role."""
        if action.row.often is Often.AS_IT_TRAVELS:
            return not self.travels_whole(self.stage(action.role).cut(action))
        return action.row.often is Often.EACH_MICROBATCH

    def enters_early(self, cut: Cut) -> bool:
        """Return whether a group begins to take a cut when it is made, to compute on another microbatch meanwhile."""
        return cut.gathered and cut.gradient and not cut.sent and not self.travels_whole(cut)

    def rank_program(self, rank: int) -> RankProgram:
        """The program that `rank` runs."""
        return self._rank_programs[rank]

    @cached_property
    def _rank_programs(self) -> dict[int, RankProgram]:
        return {rank: program for program in self.rank_programs for rank in program.ranks}
