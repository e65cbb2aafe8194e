"""Each rank's step as priced operations, which `events` simulates.

A rank follows its action list; layers take their roofline times, messages and collectives what `splitc.ir.wire` says:

    forward, backward   layer after layer; communication of a node is waited for at that node
    recv, modulo, ...   waited for at once, in microbatches by what computes with it; sends until the end of the step
    all_reduce, push    begun when backward has filled the bucket, waited for after it, in microbatches at the end
    multiply            waits for the gathers of late-multiplied layers, which began with the last error, or with
                        forward those of known indices; then dW = E^T X
    update              the optimizer, bound by memory
    deal, average, ...  in the step of a round after whose update they happen; some travel under further updates
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import Any

from torch import fx

from splitc.cost_models.simulation.batches import Batch
from splitc.cost_models.simulation.operations import Begin, Compute, Mark, Operation, Transfer, Wait
from splitc.cost_models.simulation.prices import UPDATE, Prices
from splitc.cost_models.simulation.stage_layers import trainable
from splitc.ir import comm_ops
from splitc.ir.comm_ops import finish_of
from splitc.ir.features import features
from splitc.ir.graph import info, starts_at_once, tensor_spec
from splitc.ir.program import Stage, TensorSpec
from splitc.ir.schedule.actions import Action
from splitc.ir.schedule.verb import Among, Waits, When
from splitc.ir.transitions import Collective
from splitc.ir.wire import inside, of_action
from splitc.ir.wire_op import What, WireOp
from splitc.runtime.collectives.layouts import State


class Step:
    """One rank's step, action by action."""

    def __init__(self, prices: Prices, rank: int, batch: Batch) -> None:
        self.prices, self.rank, self.program, self.plan = prices, rank, prices.program, prices.program.plan
        self.batch, self.update, self.last = batch, batch.update, self.plan.period
        self.device = prices.cluster.device_of(rank)
        self._memory_rate = self.device.memory_bandwidth * self.device.efficiency_of("memory")  # bytes/s
        self._done: list[Operation] = []
        self._meanwhile: list[Operation] = []  # gradients of weights that nothing waits for
        self._sends: list[Transfer] = []  # waited for at the step's end
        self._buckets: list[Transfer] = []  # begun by the current backward
        self._halves: list[WireOp] = []  # the second ones of sums, begun when the first ones have come
        self._coming: dict[Transfer, float] = {}  # bytes of memory to decode them
        self._arriving: dict[tuple[bool, str, int], list[Transfer]] = defaultdict(list)  # of microbatches
        self._late: list[tuple[str, float]] = []  # layer, seconds to multiply its factors
        self._gathers: list[tuple[WireOp, Transfer]] = []  # of these factors
        self._pulls: dict[tuple[str, int | None], list[Transfer]] = defaultdict(list)

    def operations(self) -> list[Operation]:
        if not any(self.rank in ranks for ranks in self.plan.ranks_by_roles.values()):
            self._action(Action("sum_loss"), ())  # a rank without work learns the loss
            self._wait(self._sends)
        else:
            actions = self.program.rank_program(self.rank).actions
            own = tuple(each for each in actions if self.batch.does(each))
            for k, action in enumerate(own):
                self._action(action, own[k + 1 :])
            self._finish()
            self._summed()
            self._wait(self._sends)
            self._update(self._trained() if self.batch.last else 0.0)
            ends, begins = ([a for a in actions if a.row.when is w] for w in (When.AFTER_ROUND, When.BEFORE_ROUND))
            self._between([a for a in ends if (a.update or self.last) == self.update])
            self._between([a for a in begins if self.last == self.update])
        return [*(self.prices.repeated(each) for each in self._done), Mark()]

    def _action(self, action: Action, later: tuple[Action, ...]) -> None:
        row = action.row
        if row.unit and row.what in (What.NODE, What.NODE_GRADIENT, What.ENTRY):
            arriving = self._arriving.pop((row.backward, action.role, action.microbatch), ())
            self._wait(arriving)
        match row.waits:
            case Waits.COMPUTES:
                self._compute(action, later)
            case Waits.AFTER_BACKWARD:  # which began it
                self._finish()
                if not self.plan.in_pieces or row.what is What.PUSH:  # else waited for at the step's end
                    self._summed()
            case Waits.BY_NODES:
                self._pull(action)
            case Waits.ONE_BY_ONE:
                self._reduce_gradients(action)
            case Waits.AT_THE_END:
                self._sends += self._begin(self._wire(action))
            case _ if (reader := self._reader(action)) is not None:
                self._arriving[row.backward, reader, action.microbatch] += self._begin(self._wire(action))
            case _:
                self._block(self._wire(action))

    def _compute(self, action: Action, later: tuple[Action, ...]) -> None:
        match action.verb:
            case "forward":
                self._forward(self.program.stage(action.role), action)
            case "backward":
                self._backward(self.program.stage(action.role), action, later)
            case "multiply":
                self._multiply()
            case "update":
                self._update(trainable(self.program, self.program.stage(action.role), self.rank))

    def _reader(self, action: Action) -> str | None:
        """The role that waits, when it computes, for what travels while the rank computes on another microbatch."""
        if action.row.waits is Waits.BY_COMPUTING:
            return action.role if self.program.repeats(action) else None
        if action.row.among is not Among.GROUP:
            return None
        cut = self.program.stage(action.role).cut(action)
        if not self.program.enters_early(cut):
            return None
        return cut.producer if action.row.backward else cut.consumer

    def _wire(self, action: Action) -> list[WireOp]:
        ops = list(of_action(self.program, self.rank, action))
        in_round = action.row.what is What.LOSS and self.plan.joins_losses
        return ops if not in_round else ops[-1:] if self.update == self.last else ops[:-1]  # of a unit

    def _between(self, actions: Sequence[Action]) -> None:
        """Copy and begin what one kind of action exchanges; wait for it, or for what began before, and copy it back."""
        verbs = {each.verb for each in self.program.rank_program(self.rank).actions}
        for verb, alike in groupby(actions, key=lambda action: action.verb):
            begun: list[tuple[Transfer, float]] = []
            for action in alike:
                key = self.rank, action.role, action.bucket
                found = self.prices.travelling.pop(key, [])
                for op in self._wire(action):
                    own = op.nbytes / (len(op.ranks) if op.algorithm == Collective.ALL_TO_ALL else 1)
                    self._copy(str(op.payload), own)
                    found += ((transfer, own) for transfer in self._begin([op]))
                if action.row.lands in verbs:
                    self.prices.travelling[key] = found
                else:
                    begun += found
            if begun:
                self._done.append(Wait(tuple(transfer for transfer, _ in begun)))
                self._copy(verb, sum(own for _, own in begun))

    # -- a stage -------------------------------------------------------------------------------------------------------

    def _forward(self, stage: Stage, action: Action) -> None:
        exchanged, walk = self._exchanged(stage, action), self.prices.walks[stage.role]
        early, sizes = filter(starts_at_once, walk.nodes), self.plan.sizes_at(stage.role, self.rank, action.microbatch)
        started = {node: tuple(self._begin(exchanged.get(node.name, ()))) for node in early}
        for node in walk.nodes:
            if node.target is comm_ops.pull:
                bucket: Any = node.kwargs["bucket"]
                self._wait(self._pulls[stage.role, bucket])
            layer = info(node).layer
            if walk.first.get(layer) is node:
                self._done.append(Compute(layer, self._layer(stage, layer, sizes)[0]))
            self._wait(started[node]) if node in started else self._exchange(node, exchanged.get(node.name, ()))

    def _backward(self, stage: Stage, action: Action, later: tuple[Action, ...]) -> None:
        """Run the layers from the last to the first; begin a bucket when its last gradient has been computed."""
        this = (action.role, action.microbatch)
        sizes = self.plan.sizes_at(stage.role, self.rank, action.microbatch)
        waiting = [each for each in later if each.bucket is not None and (each.role, each.microbatch) == this]
        exchanged, walk = self._exchanged(stage, action), self.prices.walks[stage.role]
        tensors = {name: self.program.layer(name).tensors for name in walk.first} if waiting else {}
        late, left, alone = set[str](), Counter(chain.from_iterable(tensors.values())), set[str]()
        for node in reversed(walk.nodes):
            layer, ops = info(node).layer, exchanged.get(node.name, ())
            self._exchange(node, ops)
            if finish_of(node):
                late.add(layer)
            if node.target is comm_ops.linear and tensor_spec(node.args[0]).requires_grad:
                alone.add(layer)
            if walk.first.get(layer) is not node:
                continue
            seconds = self._layer(stage, layer, sizes)[1]
            if layer in alone:  # its weight's gradient waits for something that travels
                seconds /= 2
                self._meanwhile.append(Compute(f"multiply {layer}", seconds))
            if layer in late:
                seconds, later_seconds = self._split(stage, layer, seconds)
                self._late += [(layer, later_seconds)] * (action.microbatch == self.plan.microbatches - 1)
            self._done.append(Compute(f"d_{layer}", seconds))
            left.subtract(tensors.get(layer, ()))
            while waiting and not any(left[name] for name in reversed(stage.bucket(waiting[0]))):
                self._start(waiting.pop(0))
        for left_over in waiting:
            self._start(left_over)

    def _exchange(self, node: fx.Node, ops: Sequence[WireOp]) -> None:
        """Begin what a node exchanges, and wait for what no later action waits for."""
        if finish_of(node):
            self._gathers += zip(ops, self._begin(ops), strict=True)
        else:
            self._block(ops)

    def _start(self, action: Action) -> None:
        """Begin the all-reduce or the push of a bucket."""
        ops = self._wire(action)
        if action.verb == "all_reduce" and ops:
            self._copy(f"bucket{action.bucket}", ops[0].computed)
            early = 0 if ops[0].shares else 1  # of unequal parts, sums go to all while numbers come
            self._halves += ops[early:]
            ops = ops[:early]
        for transfer, op in zip(self._begin(ops), ops, strict=True):
            (self._sends if op.kind == "send" and self.plan.overlap else self._buckets).append(transfer)

    def _summed(self) -> None:
        """Wait for buckets; of those that travel in a short format or unequal parts the sums go to all ranks now."""
        self._wait(self._buckets)
        halves, self._buckets, self._halves = self._halves, [], []
        for op in halves:
            self._wait(self._begin([op]))

    def _finish(self) -> None:
        """Compute the gradients of weights that are left."""
        self._done += self._meanwhile
        self._meanwhile = []

    def _multiply(self) -> None:
        self._wait([transfer for _, transfer in self._gathers])
        for op, _ in self._gathers:
            self._copy(str(op.payload), op.computed * (1 + 1 / len(op.ranks)))  # packed before, and unpacked
        self._done += [Compute(f"multiply {layer}", seconds) for layer, seconds in self._late]
        self._late, self._gathers = [], []

    def _layer(self, stage: Stage, layer: str, sizes: tuple[int, ...]) -> tuple[float, float]:
        """Return the forward and backward time of a layer, its shard or subnet, on this rank in a microbatch (s).

        sizes: its examples on the members of the rank's group.
        """
        holding, share = self.plan.placements[layer].holding, 1.0
        if holding == "replicated" and self.plan.placements[layer].state == State.BATCH:
            k = self.plan.group(stage.role, self.rank).index(self.rank)
            sizes = sizes[k : k + 1]
        batch = sum(sizes)
        if not batch:
            return 0.0, 0.0
        forward, backward = self.prices.layer(layer, batch, self.device)
        if holding == "sharded":
            share = 1 / len(self.plan.group(stage.role, self.rank))
        for feature in features():
            share *= feature.share(self.program, stage, layer, self.rank)
        return share * forward, share * backward

    def _split(self, stage: Stage, layer: str, backward: float) -> tuple[float, float]:
        """Return the times of a late-multiplied layer's input gradient, and of its weight gradient of all examples (s).

        Both take equal FLOPs for equal examples; a layer whose input needs no gradient has the latter only.
        """
        everyones = self.prices.layer(layer, self.plan.batch_offsets[stage.role][-1], self.device)[1]
        nodes = [n for n in stage.graph.nodes if finish_of(n) and info(n).layer == layer]
        specs = [info(node.all_input_nodes[0]).spec for node in nodes]
        if not any(isinstance(spec, TensorSpec) and spec.requires_grad for spec in specs):
            return 0.0, everyones
        return backward / 2, everyones / 2

    def _exchanged(self, stage: Stage, action: Action) -> dict[str, list[WireOp]]:
        """Return node -> what it communicates in this forward or backward."""
        found: dict[str, list[WireOp]] = defaultdict(list)
        for node, op in inside(self.program, stage, self.rank, action):
            found[node.name].append(op)
        return found

    # -- servers, the optimizer, transfers -----------------------------------------------------------------------------

    def _pull(self, action: Action) -> None:
        """Begin to receive all parameters; with overlap a node waits for its bucket, else all are waited for here."""
        ops = self._wire(action)
        for transfer, op in zip(self._begin(ops), ops, strict=True):
            if op.kind == "send":
                self._sends.append(transfer)
            else:
                self._pulls[action.role, op.payload.bucket].append(transfer)
        if not self.plan.overlap:
            self._wait([transfer for waited in self._pulls.values() for transfer in waited])

    def _reduce_gradients(self, action: Action) -> None:
        """Add the workers' gradients on a server as they arrive."""
        ops = self._wire(action)
        for transfer, op in zip(self._begin(ops), ops, strict=True):
            self._wait([transfer])
            self._copy(str(op.payload), 1.5 * op.computed)  # two read, one written

    def _trained(self) -> float:
        """Return the bytes of the parameters that this rank's optimizer updates at the step's end."""
        own = [feature.updated(self.program, self.rank) for feature in features()]
        nbytes, elsewhere = sum(nbytes for nbytes, _ in own), {name for _, names in own for name in names}
        for stage in self.program.stages:
            if self.rank in self.plan.roles[stage.role] and self.plan.grouping(stage.role).updates == "once":
                nbytes += trainable(self.program, stage, self.rank, elsewhere)
        return nbytes

    def _update(self, nbytes: float) -> None:
        if nbytes:
            self._done.append(Compute("update", UPDATE * nbytes / self._memory_rate))

    def _copy(self, name: str, nbytes: float) -> None:
        """Read and write `nbytes`."""
        self._done.append(Compute(f"copy {name}", 2 * nbytes / self._memory_rate))

    def _begin(self, ops: Iterable[WireOp]) -> list[Transfer]:
        begun = []
        for op in ops:
            begun.append(self.prices.transfer(self.rank, op))
            leaving, self._coming[begun[-1]] = op.cast
            self._cast("encode", leaving)
            self._done.append(Begin(begun[-1], op.sent))
        return begun

    def _wait(self, transfers: Sequence[Transfer]) -> None:
        """Wait for transfers, and decode what has come in a short format."""
        self._done += [Wait(tuple(transfers))] * bool(transfers)
        self._cast("decode", sum(self._coming.pop(transfer, 0.0) for transfer in transfers))

    def _cast(self, name: str, nbytes: float) -> None:
        """Read and write `nbytes` in all."""
        self._done += [Compute(name, nbytes / self._memory_rate)] * bool(nbytes)

    def _block(self, ops: Iterable[WireOp]) -> None:
        """Begin transfers and wait for them; a copy joins the parts of a gather or a reduce-scatter."""
        ops = list(ops)
        if begun := self._begin(ops):
            if ops[0].kind == "collective" and self._meanwhile:
                self._done.append(self._meanwhile.pop(0))
            self._wait(begun)
        for op in ops:
            if op.algorithm in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
                self._copy(str(op.payload), op.computed)
