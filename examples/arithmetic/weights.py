"""Transfer of the policy's weights to the producers: a broadcast from the first policy worker, without a copy
through Ray."""

from __future__ import annotations

import ray
import torch.distributed as dist
from torch import Tensor

from workers.directory import DirectoryClient
from workers.directory.address import WorkerAddress
from workers.messages import AsyncWork, Messenger, participants

from .worker import PolicyWorker

SOURCE, LISTENERS = "policy", "listeners"


class WeightLine:
    """One end of the transfer: the source, or listener number `rank` of `listeners`. directory: address of the
    job's directory."""

    def __init__(self, directory: str, listeners: int, *, rank: int | None = None) -> None:
        me = WorkerAddress(SOURCE, 0) if rank is None else WorkerAddress(LISTENERS, rank)
        self._directory = DirectoryClient(directory)
        self._messenger = Messenger(me, self._directory, host=ray.util.get_node_ip_address())
        self._all = participants([(SOURCE, 0), (LISTENERS, list(range(listeners)))])
        self._in_flight: AsyncWork[None] | None = None

    def send(self, weights: dict[str, Tensor]) -> None:
        """Send the current weights to all listeners. Waits until all have the previous ones."""
        if self._in_flight is not None:
            self._in_flight.wait()
        self._in_flight = self._messenger.broadcast(weights, self._all, async_op=True)

    def receive(self) -> dict[str, Tensor]:
        """Return the next weights that the source sends."""
        return self._messenger.broadcast(None, self._all)

    def close(self) -> None:
        """Disconnect from the job."""
        self._messenger.close()
        self._directory.close()


class SendingWorker(PolicyWorker):
    """A policy worker. The worker on the first rank sends weights."""

    _line: WeightLine | None = None

    def join(self, directory: str, listeners: int) -> None:
        """Become the source of the weights, on the first rank."""
        if dist.get_rank() == 0:
            self._line = WeightLine(directory, listeners)

    def send_weights(self) -> None:
        """Send the policy's weights. Call this on all ranks. The first data-parallel rank gathers them."""
        if self.mesh.get_local_rank("dp") == 0:
            whole = self.learner.weights()
            if self._line is not None:
                self._line.send(whole)

    def leave(self) -> None:
        """Stop sending weights."""
        line, self._line = self._line, None
        if line is not None:
            line.close()
