"""What generated code calls to exchange parameters and gradients with servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from ..spec import Bucket, RoleSpec, Served, StepContext
from ..transport.messages import Messages
from .parameter_server import ServedBuckets, Server, served_parameters


class ServerComm:
    """A rank's exchange with servers, or as one; a `RoleComm` says in which role."""

    _spec: RoleSpec
    _messages: Messages
    _context: StepContext
    _served_buckets: dict[nn.Module, ServedBuckets]
    _served_parameters: dict[nn.Module, dict[str, nn.Parameter]]

    @property
    def _is_last(self) -> bool:
        """Whether the microbatch is the last one."""
        raise NotImplementedError

    def served_parameters(self, stage: nn.Module) -> dict[str, nn.Parameter]:
        """The rows that this worker serves to all workers, as parameters that are views of the stage's own."""
        if stage not in self._served_parameters:
            self._served_parameters[stage] = served_parameters(stage, self._spec.served_rows)
        return self._served_parameters[stage]

    def send_parameters(self, stage: nn.Module, served: Served) -> None:
        """As a server, send the workers their parameters."""
        if self._context.is_first:
            self._server(stage).send_all(served, self._spec.workers)

    def reduce_gradients(self, stage: nn.Module, served: Served) -> None:
        """As a server, leave the sum of the workers' gradients in `.grad`."""
        if self._context.is_last:
            self._server(stage).reduce_all(served, self._spec.workers)

    def start_pulls(self, stage: nn.Module, buckets: Sequence[Bucket]) -> None:
        """Start to receive the parameters of all buckets; `pull` waits for one of them."""
        if self._context.is_first:
            self._buckets_of(stage, buckets).start_pulls()

    def pull(self, bucket: int) -> None:
        """Wait for the parameters of a bucket, just before they are read."""
        for served in self._served_buckets.values():
            served.pull(bucket)

    def pull_all(self, stage: nn.Module, buckets: Sequence[Bucket]) -> None:
        """Receive all parameters before anything is computed."""
        if self._context.is_first:
            self._buckets_of(stage, buckets).pull_all()

    @contextmanager
    def push(self, stage: nn.Module, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Push each bucket of gradients once the backward inside has filled it, in the last microbatch and batch."""
        if not (self._context.is_last and self._is_last):
            yield
            return
        with self._buckets_of(stage, buckets).while_backward():
            yield

    def push_all(self, stage: nn.Module, buckets: Sequence[Bucket]) -> None:
        """Push all gradients, after backward."""
        if self._context.is_last and self._is_last:
            self._buckets_of(stage, buckets).push_all()

    def _server(self, stage: nn.Module) -> Server:
        parameters = {**dict(stage.named_parameters(remove_duplicate=False)), **self.served_parameters(stage)}
        return Server(self._messages, parameters)

    def _buckets_of(self, stage: nn.Module, buckets: Sequence[Bucket]) -> ServedBuckets:
        if stage not in self._served_buckets:
            workers, server = self._spec.replicas, self._server(stage)
            self._served_buckets[stage] = ServedBuckets(self._messages, stage, buckets, workers, server)
        return self._served_buckets[stage]
