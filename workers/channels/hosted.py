"""A broker that is registered in the job's directory under the name of its node."""

from __future__ import annotations

from workers.channels.broker import ChannelBroker
from workers.channels.discovery import broker_name
from workers.directory import DirectoryClient


class HostedBroker:
    """Serves from construction to `close`. The broker of a node takes over the name from its dead predecessor. If the
    directory declares this process lost, for example because it was paused, its client registers it again.

    host, capacity_bytes: see `ChannelBroker`. Raises the errors of `ChannelBroker`, and `DirectoryLostError`.
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
        """The endpoint of the broker."""
        return self._broker.endpoint

    def wait(self) -> bool:
        """Block until the broker stops. Return whether it was closed; if not, its log has the error."""
        self._broker.wait()
        return self._closing

    def close(self) -> None:
        """Close the broker. The items of its channels are lost. Idempotent."""
        self._closing = True  # first: `wait` reads it once the broker has ended
        self._broker.close()
        self._directory.close()

    def _register(self) -> DirectoryClient:
        """Register the broker. Return the client, which keeps the entry alive."""
        directory = DirectoryClient(self._address)
        try:
            # returns=True: if this process dies, its successor registers the name again, and lookups wait for that.
            directory.register_channel(self._name, (self._broker.endpoint,), {}, returns=True)
        except BaseException:
            directory.close()
            raise
        return directory
