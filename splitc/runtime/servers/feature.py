"""What generated code calls to exchange parameters and gradients with servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from ..comm.role import Part
from ..moments import Feature
from ..spec import Bucket, RankSpec, Served, Shard
from .parameter_server import ServedBuckets, Server, served_parameters


@dataclass
class ServerComm(Part):
    """A role's exchange with servers, or as one."""

    buckets: dict[nn.Module, ServedBuckets] = field(default_factory=dict)
    served: dict[nn.Module, dict[str, nn.Parameter]] = field(default_factory=dict)

    @property
    def rows(self) -> Mapping[str, Shard]:
        return self.role.spec.served_rows

    def updated(self, stage: nn.Module) -> Mapping[str, nn.Parameter]:
        """The rows that this worker serves to all workers, as parameters that are views of the stage's own."""
        if stage not in self.served:
            self.served[stage] = served_parameters(stage, self.rows)
        return self.served[stage]

    def copies(self, stage: nn.Module) -> set[nn.Parameter]:
        """The parameters that servers hold, and this rank no row of them."""
        parameters = dict(stage.named_parameters(remove_duplicate=False))
        every = (each for buckets in self.role.rank.served.values() for bucket in buckets for each in bucket.items())
        elsewhere = (name for name, parts in every if self.role.rank.index not in {rows.server for rows in parts})
        return {parameters[name] for name in elsewhere if name in parameters}

    def send_parameters(self, stage: nn.Module, served: Served) -> None:
        """As a server, send the workers their parameters."""
        if self.role.context.is_first:
            self._server(stage).send_all(served, self.role.spec.workers)

    def reduce_gradients(self, stage: nn.Module, served: Served) -> None:
        """As a server, leave the sum of the workers' gradients in `.grad`."""
        if self.role.context.is_last:
            self._server(stage).reduce_all(served, self.role.spec.workers)

    def start_pulls(self, stage: nn.Module, buckets: Sequence[Bucket]) -> None:
        """Start to receive the parameters of all buckets; `pull` waits for one of them."""
        if self.role.context.is_first:
            self._buckets_of(stage, buckets).start_pulls()

    def pull(self, bucket: int) -> None:
        """Wait for the parameters of a bucket, just before they are read."""
        for served in self.buckets.values():
            served.pull(bucket)

    def pull_all(self, stage: nn.Module, buckets: Sequence[Bucket]) -> None:
        """Receive all parameters before anything is computed (Stanza 5)."""
        self.start_pulls(stage, buckets)
        for k in reversed(range(len(buckets))):
            self.pull(k)

    @contextmanager
    def push(self, stage: nn.Module, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Push each bucket of gradients once the backward inside has filled it, in the last microbatch and batch."""
        if not (self.role.context.is_last and self.examples.is_last):
            yield
            return
        served = self._buckets_of(stage, buckets)
        with served.in_order.while_backward():
            yield
        served.finish()

    def push_all(self, stage: nn.Module, buckets: Sequence[Bucket]) -> None:
        """Push all gradients, after backward."""
        if self.role.context.is_last and self.examples.is_last:
            served = self._buckets_of(stage, buckets)
            served.in_order.start_all()
            served.finish()

    def _server(self, stage: nn.Module) -> Server:
        parameters = {**dict(stage.named_parameters(remove_duplicate=False)), **self.updated(stage)}
        return Server(self.role, parameters)

    def _buckets_of(self, stage: nn.Module, buckets: Sequence[Bucket]) -> ServedBuckets:
        if stage not in self.buckets:
            self.buckets[stage] = ServedBuckets(self.role, stage, buckets, self._server(stage))
        return self.buckets[stage]


class OnServers(Feature):
    """Parameters that servers hold and train: a server its rows, a worker copies of what it pulled."""

    comm = ServerComm
    name = "parameters on servers"

    @staticmethod
    def concerns(spec: RankSpec) -> bool:
        return bool(spec.served)
