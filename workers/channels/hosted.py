"""A broker that the job's directory has under the name of its node."""

from __future__ import annotations

from workers.channels.broker import ChannelBroker
from workers.channels.settings import broker_name
from workers.directory import DirectoryClient


class HostedBroker:
    """Serves from construction to `close`. The broker of a node takes the name from the one before it, which is dead;
    where the directory gave this process up, as it does with one that stands still, its client registers it again.

    host, capacity_bytes: see `ChannelBroker`. Raises what that does, and `DirectoryLostError`.
    """

    def __init__(
        self, directory_address: str, node_rank: int, *, host: str = "127.0.0.1", capacity_bytes: int | None = None
    ) -> None:
        self._address = directory_address
        self._name = broker_name(node_rank)
        self._closing = False
        self._broker = ChannelBroker(host=host, capacity_bytes=capacity_bytes)
        try:
            self._directory = self._register()
        except BaseException:
            self._broker.close()
            raise

    @property
    def endpoint(self) -> str:
        """Where it is."""
        return self._broker.endpoint

    def wait(self) -> bool:
        """Block until the broker serves no more; whether it was closed. Its log says why it was not."""
        self._broker.wait()
        return self._closing

    def close(self) -> None:
        """End the broker; what its channels hold is lost. Idempotent."""
        self._closing = True
        self._broker.close()
        self._directory.close()

    def _register(self) -> DirectoryClient:
        directory = DirectoryClient(self._address)
        try:
            directory.register_channel(self._name, (self._broker.endpoint,), {}, returns=True)
        except BaseException:
            directory.close()
            raise
        return directory
