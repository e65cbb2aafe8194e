"""What each rank of a rewritten program does in a step, priced: the operations that `events` simulates.

A rank does what its part's action list says, with its layers' roofline times and what `splitc.ir.wire` says of every
message and collective:

    forward, backward   its layers, one after the other; what layers exchange inside is waited for there
    recv, modulo, ...   waited for at once; sends are under way until the step's end
    reduce, push        begun as backward fills a bucket, waited for after it (design, "Order on the wire")
    multiply            waits for what late-multiplied layers gathered since their error was there; then W' = E^T X
    update              the optimizer, bound by memory
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import fx

from splitc.cost_models.compute.dtypes import layer_dtypes
from splitc.cost_models.compute.roofline import backward_seconds, forward_seconds
from splitc.cost_models.simulation.events import Begin, Compute, Mark, Operation, Transfer, Wait
from splitc.cost_models.simulation.paths import Paths
from splitc.ir import comm_ops
from splitc.ir.actions import Action
from splitc.ir.cluster import Cluster, Device
from splitc.ir.program import LoweredProgram, PlacedProgram, Program, Stage, TensorSpec
from splitc.ir.wire import WireOp, inside, numel_on, of_action, wire

_UPDATE = {0: 3, 1: 8, 2: 19}
"""How often SGD, SGD with momentum and Adam read or write as many bytes as the parameters have, in an update."""

_BLOCKING = ("recv", "recv_grad", "modulo", "modulo_grad", "all_gather_grad", "all_reduce_tied")
_LOCAL = ("slice_batch",)  # moves nothing


def step_operations(prices: Prices, rank: int) -> list[Operation]:
    """One step of `rank`; both ends of a transfer get the same one until the next `begin_step`."""
    return _Step(prices, rank).operations()


class Prices:
    """What things cost on a cluster, looked up once.  optimizer_copies: of the parameters, in the optimizer's state."""

    def __init__(self, program: LoweredProgram, cluster: Cluster, optimizer_copies: int = 1) -> None:
        self.program, self.cluster = program, cluster
        self.passes = _UPDATE.get(optimizer_copies, 3 + 8 * optimizer_copies)
        plan = program.plan
        self._paths = Paths(cluster, plan.world)
        self._dtypes = layer_dtypes(program, cluster.device)
        self._devices: dict[int, Device] = {}
        self._seconds: dict[tuple[str, int, int], tuple[float, float]] = {}
        self._transfers: dict[tuple[object, ...], Transfer] = {}

    def begin_step(self) -> None:
        """From now on all transfers are new ones."""
        self._transfers = {}

    def device(self, rank: int) -> Device:
        """What `rank` computes on, a core of its own where ranks share some; one object for ranks that are alike."""
        found = self.cluster.device_of(rank)
        return self._devices.setdefault(id(found), found)

    def layer(self, layer: str, batch: int, device: Device) -> tuple[float, float]:
        """Seconds of forward and backward of a whole layer."""
        key = layer, batch, id(device)
        if key not in self._seconds:
            cost, dtype = self.program.costs[layer].at(batch), self._dtypes[layer]
            self._seconds[key] = forward_seconds(cost, device, dtype), backward_seconds(cost, device, dtype)
        return self._seconds[key]

    def transfer(self, rank: int, op: WireOp, nth: int) -> Transfer:
        """What an operation of `rank` is an end of; `nth`: of this label on that rank."""
        ends: tuple[int, ...]
        key: tuple[object, ...]
        if op.kind == "collective":  # groups of one label have different first ranks
            ends, key = op.ranks, (op.label, op.ranks[0], nth)
        else:
            ends = (rank, op.ranks[0]) if op.kind == "send" else (op.ranks[0], rank)
            key = op.label, ends, nth
        if key not in self._transfers:
            self._transfers[key] = self._paths.transfer(op, ends)
        return self._transfers[key]


class _Step:
    """One rank's step, action by action."""

    def __init__(self, prices: Prices, rank: int) -> None:
        self.prices, self.rank, self.program = prices, rank, prices.program
        self.plan = self.program.plan
        self.device = prices.device(rank)
        self._done: list[Operation] = []
        self._counts: dict[tuple[str, str, int], int] = defaultdict(int)
        self._sends: list[Transfer] = []  # waited for at the step's end
        self._sums: list[Transfer] = []  # of the backward under way
        self._late: list[tuple[str, list[Transfer], float]] = []  # layer, what it gathers, seconds to multiply it
        self._pulls: dict[tuple[str, int], list[Transfer]] = defaultdict(list)

    def operations(self) -> list[Operation]:
        if not any(self.rank in ranks for ranks in self.plan.ranks_by_roles.values()):
            self._block(wire(self.program, self.rank))  # a rank without work learns the loss
        else:
            actions = self.program.rank_program(self.rank).actions
            for k, action in enumerate(actions):
                self._action(action, actions[k + 1 :])
            self._done.append(Wait(tuple(self._sends)))
            self._update(self._trained())
        return [*self._done, Mark()]

    def _action(self, action: Action, later: tuple[Action, ...]) -> None:
        verb = action.verb
        if verb == "forward":
            self._forward(self.program.stage(action.own), action)
        elif verb == "backward":
            self._backward(self.program.stage(action.own), action, later)
        elif verb == "multiply":
            self._multiply()
        elif verb in ("all_reduce", "push"):  # begun in backward
            self._done.append(Wait(tuple(self._sums)))
            self._sums = []
        elif verb == "update":
            self._update(_trainable(self.program, self.program.stage(action.own), self.rank))
        elif verb == "pull":
            self._pull(self.program.stage(action.own), action)
        elif verb == "reduce_gradients":
            self._collect(action)
        elif verb in _BLOCKING:
            self._block(of_action(self.program, self.rank, action))
        elif verb not in _LOCAL:  # a send, the sum of the loss, what a server gives
            self._sends += self._begin(of_action(self.program, self.rank, action))

    # -- a stage -------------------------------------------------------------------------------------------------------

    def _forward(self, stage: Stage, action: Action) -> None:
        exchanged = self._exchanged(stage, action)
        first = _first_nodes(stage)
        for node in stage.graph.nodes:
            if node.target is comm_ops.pull:
                bucket: object = node.kwargs["bucket"]
                self._done.append(Wait(tuple(self._pulls[stage.role, int(str(bucket))])))
            layer = node.meta.get("layer")
            if first.get(layer) is node:
                self._done.append(Compute(layer, self._layer(stage, layer, action)[0]))
            self._block(exchanged.get(node.name, ()))

    def _backward(self, stage: Stage, action: Action, later: tuple[Action, ...]) -> None:
        """Layers from the last to the first; each bucket begins when the last of its gradients is there."""
        waiting = [
            a for a in later if a.verb in ("all_reduce", "push") and (a.own, a.turn) == (action.own, action.turn)
        ]
        exchanged, first, users = self._exchanged(stage, action), _first_nodes(stage), _users(self.program, stage)
        gathers: dict[str, list[Transfer]] = defaultdict(list)
        for node in reversed(list(stage.graph.nodes)):
            layer, ops = node.meta.get("layer"), exchanged.get(node.name, ())
            if node.target is comm_ops.late_multiply:
                gathers[layer] += self._begin(ops)
            else:
                self._block(ops)
            if first.get(layer) is not node:
                continue
            seconds = self._layer(stage, layer, action)[1]
            if layer in gathers:
                seconds, later_seconds = self._split(stage, layer, seconds)
                self._late.append((layer, gathers[layer], later_seconds))
            self._done.append(Compute(f"d_{layer}", seconds))
            for left in users.values():
                left.discard(layer)
            while waiting and not any(users[name] for name in _bucket(stage, waiting[0])):
                self._start(waiting.pop(0))
        for left_over in waiting:
            self._start(left_over)

    def _start(self, action: Action) -> None:
        """Begin the sum or the push of a bucket."""
        ops = list(of_action(self.program, self.rank, action))
        if action.verb == "all_reduce" and ops:
            self._copy(action.value, ops[0].nbytes)
        for transfer, op in zip(self._begin(ops), ops, strict=True):
            (self._sends if op.kind == "send" and self.plan.overlap else self._sums).append(transfer)

    def _multiply(self) -> None:
        for layer, gathers, seconds in self._late:
            self._done += [Wait(tuple(gathers)), Compute(f"multiply {layer}", seconds)]
        self._late = []

    def _layer(self, stage: Stage, layer: str, action: Action) -> tuple[float, float]:
        """Forward and backward of a layer on this rank in a turn; a divided one computes its part."""
        batch = sum(b - a for a, b in self.plan.microbatch_intervals(stage.role, self.rank, action.turn))
        if not batch:
            return 0.0, 0.0
        forward, backward = self.prices.layer(layer, batch, self.device)
        sharded = self.plan.placements[layer].holding == "sharded"
        parts = len(self.plan.group(stage.role, self.rank)) if sharded else 1
        return forward / parts, backward / parts

    def _split(self, stage: Stage, layer: str, backward: float) -> tuple[float, float]:
        """Of a late-multiplied layer: seconds of the input's gradient now, and of the weight's, of all ranks' examples.

        Both take as many FLOPs; a layer whose input needs no gradient has the latter only.
        """
        everyones = self.prices.layer(layer, self.plan.batch_offsets[stage.role][-1], self.device)[1]
        nodes = [n for n in stage.graph.nodes if n.target is comm_ops.late_multiply and n.meta.get("layer") == layer]
        specs = [node.all_input_nodes[0].meta.get("spec") for node in nodes]
        if not any(isinstance(spec, TensorSpec) and spec.requires_grad for spec in specs):
            return 0.0, everyones
        return backward / 2, everyones / 2

    def _exchanged(self, stage: Stage, action: Action) -> dict[str, list[WireOp]]:
        """Node -> what it exchanges in this forward or backward."""
        found: dict[str, list[WireOp]] = defaultdict(list)
        for node, op in inside(self.program, stage, self.rank, action):
            found[node.name].append(op)
        return found

    # -- with servers --------------------------------------------------------------------------------------------------

    def _pull(self, stage: Stage, action: Action) -> None:
        """All parameters begin to arrive; with overlap a node waits for its bucket, else all are waited for here."""
        ops = list(of_action(self.program, self.rank, action))
        bucket_of = {name: k for k, bucket in enumerate(stage.served) for name in bucket}
        for transfer, op in zip(self._begin(ops), ops, strict=True):
            if op.kind == "send":
                self._sends.append(transfer)
            else:
                name = op.label.removeprefix("pull ").partition("[")[0]
                self._pulls[stage.role, bucket_of[name]].append(transfer)
        if not self.plan.overlap:
            self._done.append(Wait(tuple(t for waited in self._pulls.values() for t in waited)))

    def _collect(self, action: Action) -> None:
        """A server adds up the workers' gradients as they arrive."""
        ops = list(of_action(self.program, self.rank, action))
        for transfer, op in zip(self._begin(ops), ops, strict=True):
            self._done.append(Wait((transfer,)))
            self._copy(op.label, 1.5 * op.nbytes)  # two read, one written

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _trained(self) -> float:
        """Bytes that this rank's optimizer updates at the step's end."""
        nbytes = 0.0
        for stage in self.program.stages:
            served = {name for bucket in stage.served for name in bucket}
            if self.rank in self.plan.servers:
                nbytes += sum(self.program.tensors[name].nbytes for name in served) / len(self.plan.servers)
            grouping = self.plan.groups.get(stage.role)
            if self.rank in self.plan.roles[stage.role] and (grouping is None or grouping.updates == "once"):
                nbytes += _trainable(self.program, stage, self.rank, served)
        return nbytes

    def _update(self, nbytes: float) -> None:
        if nbytes:
            self._done.append(Compute("update", self.prices.passes * nbytes / self._memory_rate))

    def _copy(self, name: str, nbytes: float) -> None:
        """Read and write so many bytes."""
        self._done.append(Compute(f"copy {name}", 2 * nbytes / self._memory_rate))

    @property
    def _memory_rate(self) -> float:
        return self.device.memory_bandwidth * self.device.reached("memory")

    def _begin(self, ops: Iterable[WireOp]) -> list[Transfer]:
        begun = []
        for op in ops:
            key = op.kind, op.label, op.ranks[0]
            begun.append(self.prices.transfer(self.rank, op, self._counts[key]))
            self._counts[key] += 1
            self._done.append(Begin(begun[-1], op.sent))
        return begun

    def _block(self, ops: Iterable[WireOp]) -> None:
        """Begin transfers and wait for them; what a gather or a sum of parts brings is put together by a copy."""
        ops = list(ops)
        if begun := self._begin(ops):
            self._done.append(Wait(tuple(begun)))
        for op in ops:
            if op.algorithm in ("all_gather", "reduce_scatter"):
                self._copy(op.label, op.nbytes)


def _bucket(stage: Stage, action: Action) -> tuple[str, ...]:
    """The parameters of a `reduce` or a `push`."""
    buckets = stage.buckets if action.verb == "all_reduce" else stage.served
    return buckets[int(action.value.removeprefix("bucket"))]


def _first_nodes(stage: Stage) -> dict[str, fx.Node]:
    """Layer -> its first node in the stage that computes: there its forward begins and its backward ends."""
    found: dict[str, fx.Node] = {}
    for node in stage.graph.nodes:
        layer = node.meta.get("layer")
        computes = node.op not in ("placeholder", "output", "get_attr") and node.target not in comm_ops.ENTRIES
        if layer in stage.layers and computes:
            found.setdefault(layer, node)
    return found


def _users(program: Program, stage: Stage) -> dict[str, set[str]]:
    """Parameter -> the layers of the stage whose backward adds to its gradient."""
    first = _first_nodes(stage)
    users: dict[str, set[str]] = defaultdict(set)
    for layer in program.layers:
        if layer.name in first:
            for name in layer.tensors:
                users[name].add(layer.name)
    return users


def _trainable(program: PlacedProgram, stage: Stage, rank: int, but: Iterable[str] = ()) -> float:
    """Bytes of the parameters of a stage that a rank trains."""
    group = program.plan.group(stage.role, rank)
    names = [name for name in stage.tensors if program.tensors[name].trainable and name not in but]
    numel = ((name, numel_on(program, stage, name, group.index(rank), len(group))) for name in names)
    return float(sum(n * program.tensors[name].dtype.itemsize for name, n in numel))
