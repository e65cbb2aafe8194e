"""One rank of a compiled program, bound to its transport: the communicators of its roles, and the steps it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from .collectives.deferred_gradients import DeferredGradients
from .collectives.gradients import all_reduce_tied
from .comm.role import Role
from .errors import LaunchError
from .pieces import Pieces, pieces_of
from .role_comm import RoleComm
from .spec import RankSpec, RoleSpec, StepContext, refused_batch
from .transport.base import Transport
from .transport.messages import Messages


class Rank:
    """A rank that takes part in training.

    spec: what its generated file says of it.  comms: a communicator for each of its roles, in their order.
    deferred: what is computed while transfers travel, at the latest at the end of a step.
    sent_bytes: payload that it has sent in steps so far.  evaluated: batches, in evaluation mode.

    Constructing it is collective: the ranks create their communicators, and learn each other's examples.
    Raises LaunchError when the transport is that of another rank or world.
    """

    def __init__(self, spec: RankSpec, transport: Transport, update: Callable[[str], None] = lambda role: None) -> None:
        """update: called with a role's name when its parameters are to be updated before its next microbatch."""
        if (transport.rank, transport.world) != (spec.index, spec.world):
            raise LaunchError(
                f"this is rank {spec.index} of {spec.world}, started as {transport.rank} of {transport.world}"
            )
        self.spec, self.transport = spec, transport
        roles = (*spec.roles, *spec.evaluated)
        groups = [r for role in roles for r in (role.replicas, role.group, role.unit, role.averaged, role.ranks)]
        transport.connect([self.everyone, *groups])
        self._examples = self._gather_examples()
        self._messages, self.deferred = Messages(transport), DeferredGradients()

        def comm(role: RoleSpec) -> RoleComm:
            own = {rank: examples for (rank, name), examples in self._examples.items() if name == role.role}
            own = own or {self.index: role.examples}
            return RoleComm(Role(spec, role, self._messages, own, update, self.deferred))

        self.comms = tuple(map(comm, spec.roles))
        self._evaluating = tuple(map(comm, spec.evaluated)) or self.comms
        self._predicting = (*self._evaluating, *map(comm, (spec.reader,) if spec.reader else ()))
        self._in_step, self.sent_bytes, self.evaluated = False, 0, 0
        self._by_hosts: Transport | None = None

    def _gather_examples(self) -> dict[tuple[int, str], tuple[int, int]]:
        """(rank, role) -> its examples of the compiled batch, of all ranks."""
        own = {(self.index, role.role): role.examples for role in self.spec.roles}
        return {key: examples for each in self.transport.all_gather_objects(own) for key, examples in each.items()}

    @property
    def index(self) -> int:
        return self.spec.index

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.spec.world))

    def on_device(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors of a batch on this rank's device."""
        device = self.transport.device
        return tuple(tensor.to(device, non_blocking=device.type == "cuda") for tensor in batch)

    def by_hosts(self) -> Transport:
        """A transport on the CPU for what hosts alone exchange, which waits for no GPU.  Collective when first used."""
        if self._by_hosts is None:
            own = self.transport
            self._by_hosts = own if own.device.type == "cpu" else own.side_group() or own
        return self._by_hosts

    def parts(self, kind: type[Any]) -> list[Any]:
        """The parts of a class that its roles have, in their order."""
        return [part for comm in self.comms for part in comm.parts if isinstance(part, kind)]

    def batch_offsets(self, sizes: Sequence[int] | None, is_tail: bool = False) -> tuple[int, ...]:
        """Where each reader's examples begin when reader k gives `sizes[k]` of them; None: as compiled.

        is_tail: of an epoch that was begun with other readers, which may leave ranks without examples.
        Raises LaunchError, on every rank alike, when some rank would be left without examples.
        """
        compiled = [last - first for first, last in pairwise(self.spec.batch_offsets)]
        sizes, readers = compiled if sizes is None else sizes, len(compiled)
        offsets = tuple(accumulate(sizes, initial=0))
        text = f"a batch of {' + '.join(map(str, sizes))} examples leaves"
        if len(sizes) != readers:
            raise LaunchError(f"sizes of {len(sizes)} readers given, but {readers} ranks read data")
        if (idle := self.without_examples(offsets)) and not is_tail:
            raise LaunchError(f"{text} rank {', '.join(map(str, idle))} without any; give each reader more")
        context = StepContext(self.spec.batch_offsets, offsets)
        if self.spec.guards and (why := refused_batch(self.spec.guards, self._batches(context))):
            raise LaunchError(f"{why}; give other sizes, or leave the batch size out of that line")
        for role in self.spec.roles:
            if not role.updated_every_microbatch:
                continue
            intervals = [context.interval(own) for (_, name), own in self._examples.items() if name == role.role]
            if min(last - first for first, last in intervals) < len(role.group):
                raise LaunchError(
                    f"{text} some of the {len(role.group)} microbatches of role {role.role} without any, and each of "
                    f"them is an update; give each reader more"
                )
        return offsets

    def _batches(self, context: StepContext) -> dict[int, str]:
        """Batch sizes of a step -> who runs them: one process, every rank by itself, and the groups of this one."""
        found = {context.offsets[-1]: "one process, with which training is to agree,"}
        whole = Pieces(self.spec.roles[0].microbatches, context.offsets)
        for (rank, name), examples in self._examples.items():
            for k in range(whole.number):
                first, last = whole.positions(context.interval(examples), k)
                found.setdefault(last - first, f"rank {rank} ({name})")
        for role in (role for role in self.spec.roles if role.group):
            own = [context.interval(self._examples[member, role.role]) for member in role.group]
            pieces = pieces_of(role.scheme, whole.number, whole.bounds, [own[0][0], *(last for _, last in own)])
            for k in range(pieces.number):
                sizes = (last - first for first, last in (pieces.positions(each, k) for each in own))
                found.setdefault(sum(sizes), f"a group of role {role.role}")
        found.pop(0, None)
        return found

    def without_examples(self, offsets: Sequence[int]) -> list[int]:
        """The ranks with work that get no example of a step with these batch offsets."""
        context, idle = StepContext(self.spec.batch_offsets, tuple(offsets)), list[int]()
        for (rank, _), examples in self._examples.items():
            first, last = context.interval(examples)
            if examples[0] < examples[1] and first == last:
                idle.append(rank)
        return list(dict.fromkeys(idle))

    def after_backward(self, stage: nn.Module, added: Mapping[str, tuple[int, ...]]) -> None:
        """Finish what of the gradients was left for the end of a step.

        added: parameters in no bucket, whose gradients are summed over the ranks that hold them.
        """
        self.deferred.finish()
        self._messages.finish()
        summed = {parameter for comm in self.comms for parameter in comm.summed(stage)} if added else set()
        own = {name: ranks for name, ranks in added.items() if stage.get_parameter(name) not in summed}
        all_reduce_tied(self.transport, stage, {name: ranks for name, ranks in own.items() if len(ranks) > 1})

    @contextmanager
    def step(self, context: StepContext, predicts: bool = False) -> Iterator[tuple[RoleComm, ...]]:
        """Around all that a step issues; gives the communicators.  On leaving, every send is complete.

        Raises LaunchError when an earlier step raised inside: the other ranks have sent and received something else.
        """
        if self._in_step:
            raise LaunchError(
                f"rank {self.index}: its last step broke off in the middle, and the ranks no longer agree on what is "
                f"on its way; start all ranks again"
            )
        self._in_step, before = True, self.transport.sent_bytes
        self.evaluated += not context.training
        comms = self.comms if context.training else self._predicting if predicts else self._evaluating
        for comm in comms:
            comm.shared.begin(context)
        yield comms
        self._messages.wait()
        self._in_step = False
        self.sent_bytes += self.transport.sent_bytes - before
