"""The broker: one thread that stores the items of channels and moves them between sockets and memory.

Clients on the broker's host map its memory and read and write items there, so only a few bytes of each item pass
through the thread. Other clients send and receive items over TCP, directly into and out of that memory. Each
connection is one client. When a connection ends, its waits end, and the next getter receives its unacknowledged
items. The broker of a node is registered in the job's directory under the name of its node.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataplane.errors import ArenaSpaceError
from dataplane.ledger.state.free_space import FreeSpace
from dataplane.storage.arena import HEADER_BYTES, Arena, default_capacity
from workers.channels import wire
from workers.channels.discovery import broker_name
from workers.channels.queues import Broker, Effects
from workers.channels.wire import NOWHERE
from workers.directory import DirectoryClient
from workers.errors import OpenFilesError
from workers.transport.framing import Message
from workers.transport.stream_server import Connection, Payload, Service, StreamServer

log = logging.getLogger(__name__)

STOP_WAIT_S = 10.0
DIRECTORY = "/dev/shm"
GROW_BYTES = 32 << 20


class ChannelBroker:
    """Serves in its own thread from construction to `close`.

    host: the name or address that the broker binds and that clients on other machines connect to, by default
    loopback. capacity_bytes: memory for items, backed when needed, by default a share of the space of `directory`.
    OSError if the host cannot be bound, ArenaSpaceError if the memory is not available, `OpenFilesError`.

    `_is_local`: for each client that has sent a valid token, whether it maps the memory; `_owner`: the process that
    made the broker; `_state`: the queues, which only the thread uses; `_directory`: the client that keeps the broker's
    name, None without a name.
    """

    def __init__(
        self, *, host: str = "127.0.0.1", capacity_bytes: int | None = None, directory: str | Path = DIRECTORY
    ) -> None:
        self._token = secrets.token_hex(16)
        self._is_local: dict[int, bool] = {}
        self._owner = os.getpid()
        with OpenFilesError.of("a channel broker"), contextlib.ExitStack() as undo:
            self._memory = ChannelMemory(capacity_bytes, directory=directory)
            undo.callback(self._memory.close)
            service = Service(take=self._handle_message, left=self._handle_leave, ended=self._close_memory)
            self._server = StreamServer("tq-channels", host, self._token, service, clients="the clients of channels")
            undo.pop_all()
        self.endpoint = str(self._server.endpoint)
        self._state = Broker(self._memory)
        self._directory: DirectoryClient | None = None
        self._closing = False
        self._server.thread.start()

    @classmethod
    def of_node(
        cls, directory_address: str, node_rank: int, *, host: str = "127.0.0.1", capacity_bytes: int | None = None
    ) -> ChannelBroker:
        """Return the broker of a node, registered in the directory; it takes over the name from its dead predecessor.
        If the directory declares this process lost, for example because it was paused, its client registers it again.
        Raises the errors of the constructor, and `DirectoryLostError`."""
        broker = cls(host=host, capacity_bytes=capacity_bytes)
        try:
            broker._directory = DirectoryClient(directory_address)
            # returns=True: if this process dies, its successor registers the name again, and lookups wait for that.
            broker._directory.register_channel(broker_name(node_rank), (broker.endpoint,), {}, returns=True)
        except BaseException:
            broker.close()
            raise
        return broker

    @property
    def alive(self) -> bool:
        """Whether the broker serves. If its thread fails, the log has the error and all connections end."""
        return self._server.thread.alive

    def wait(self) -> bool:
        """Block until the broker stops. Return whether it was closed; if not, its log has the error."""
        self._server.thread.join()
        return self._closing

    def close(self) -> None:
        """End all connections and free the memory. The items of the channels are lost. Idempotent. Does nothing in a
        forked child. RuntimeError if the thread does not stop within `STOP_WAIT_S`."""
        if os.getpid() != self._owner:
            return
        self._closing = True  # first: `wait` reads it once the thread has ended
        self._server.thread.close(STOP_WAIT_S)
        if self.alive:
            raise RuntimeError(f"channel broker did not stop within {STOP_WAIT_S:.0f} s")
        if self._directory is not None:
            self._directory.close()

    def __enter__(self) -> ChannelBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the thread

    def _handle_message(self, connection: Connection, message: Message) -> Payload | None:
        """Handle one message of a client. Return where to write the item's bytes if they follow the message."""
        request = wire.decode_request(message.body)
        if connection.ident not in self._is_local:  # its first message
            self._greet(connection, request)
        elif message.payload_bytes:
            return self._expect_payload(connection.ident, request, message.payload_bytes)
        else:
            self._send_answers(self._state.apply(connection.ident, request))
        return None

    def _handle_leave(self, client: int) -> None:
        if self._is_local.pop(client, None) is not None:
            self._send_answers(self._state.leave(client))

    def _close_memory(self, defect: BaseException | None) -> None:
        """Free the memory after the server's thread has ended. defect: the error that ended it, or None."""
        if defect is not None:
            log.critical("Channel broker failed; the items of its channels are lost", exc_info=defect)
        self._memory.close()

    def _greet(self, connection: Connection, request: wire.AnyRequest) -> None:
        """Check the token and version of a new client, and send it the descriptor of the memory if it is local and
        requests that. ValueError for an invalid token; another version is answered with Rejected."""
        if not isinstance(request, wire.OpenBroker) or not hmac.compare_digest(
            request.token.encode(), self._token.encode()
        ):
            raise ValueError("the client sent no valid token")
        client = connection.ident
        if request.version != wire.VERSION:  # not added to the clients
            why = f"the versions differ: the broker has {wire.VERSION}, the client {request.version}"
            self._server.send(client, [wire.encode(wire.Rejected(request.request_id, why))])
            return
        self._state.join(client)
        self._is_local[client] = local = request.local and connection.local
        memory = self._memory
        mapped_bytes = memory.nbytes if local else 0
        welcome = wire.Welcome(
            request.request_id,
            memory.capacity_bytes,
            arena_bytes=mapped_bytes,
            data_from=memory.nbytes - len(memory.data),  # the usable area is the end of the arena
        )
        if local:
            connection.send_with(wire.encode(welcome), memory.fd)
        else:
            self._server.send(client, [wire.encode(welcome)])

    def _expect_payload(self, client: int, request: wire.AnyRequest, nbytes: int) -> Payload:
        """Return where to write the `nbytes` that follow a put: into the space that the client reserved for them. The
        put is applied when all bytes have arrived. ValueError if the client reserved no such space."""
        if not isinstance(request, wire.Put) or request.item.space == NOWHERE or request.item.nbytes != nbytes:
            raise ValueError("the client sent bytes that belong to no item")
        self._state.reserved_bytes(client, request.item)  # only to raise if the space is not the client's
        target = self._memory.data.data[request.item.space : request.item.space + nbytes]
        return Payload(target, lambda: self._send_answers(self._state.apply(client, request)))

    def _send_answers(self, effects: Effects) -> None:
        """Send the answers. If one cannot be sent, its client's connection ends; the others are sent."""
        for client, answer in effects:
            local = self._is_local.get(client)
            if local is None:  # the client has left
                continue
            try:
                self._send_answer(client, answer, local)
            except OSError as error:
                # The next read of this socket detects the end of the connection and cleans up.
                log.debug("Channel client disconnected: %s", error)
            except Exception:
                log.exception("Channel broker could not send an answer and closed the client's connection")
                self._server.drop(client)

    def _send_answer(self, client: int, answer: wire.AnyAnswer, local: bool) -> None:
        """Send an answer, and after it the bytes of its items in the memory, which a `local` client maps itself."""
        payload: list[memoryview] = []
        if not local and isinstance(answer, wire.Items):
            data = self._memory.data.data
            # Small items are not in the memory (`NOWHERE`): their bytes are part of the answer.
            payload = [data[item.space : item.space + item.nbytes] for item in answer.items if item.space != NOWHERE]
        self._server.send(client, [wire.encode(answer, payload_bytes=sum(map(len, payload))), *payload])


class ChannelMemory:
    """An arena without a name in any file system, so that a crash leaves no file behind. Its memory is backed when
    first needed and shared through the descriptor `fd`: a process that has `fd` maps `nbytes` and finds space r at
    `HEADER_BYTES` + r. For one thread at a time.

    capacity_bytes: by default a share of the space of `directory`. ArenaSpaceError if it is not available.
    """

    def __init__(self, capacity_bytes: int | None = None, *, directory: str | Path = DIRECTORY) -> None:
        self._arena = Arena.create(directory, capacity_bytes or default_capacity(directory), epoch=1)  # its only epoch
        try:
            self.fd = os.open(self._arena.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            self._arena.close(unlink=False)  # `finally` removes the name
            raise
        finally:
            self._arena.path.unlink()
        self._space = FreeSpace(self._arena.capacity_bytes)
        self.nbytes = HEADER_BYTES + self._arena.capacity_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._space.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._space.backed_bytes - self._space.free_bytes

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The usable area. Access only reserved spaces of it."""
        return self._arena.data

    def take(self, nbytes: int) -> int | None:
        """Reserve space for `nbytes`, and back more of the arena if needed. None if there is no space now. Blocks while
        the kernel clears new pages."""
        space = self._space.take(nbytes)
        if space is None and self._grow(nbytes):
            space = self._space.take(nbytes)
        return space

    def give(self, space: int, nbytes: int) -> None:
        """Release a reserved space. The memory behind it stays with the arena, for later messages."""
        self._space.give(space, nbytes)

    def _grow(self, nbytes: int) -> bool:
        """Back more of the arena with memory, for a space of `nbytes`. Return whether the backed part grew."""
        backed = self._space.backed_bytes
        start = self._space.highest_used_bytes  # the end of the last used space; all memory after it is free
        try:
            self._arena.grow(max(start + nbytes, backed + GROW_BYTES))
        except ArenaSpaceError as error:
            log.warning("Channel memory cannot grow beyond %d bytes: %s", backed, error)
        self._space.back(self._arena.backed_bytes)
        return self._space.backed_bytes > backed

    def close(self) -> None:
        """Unmap and close the memory. Other processes keep it until they unmap it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._arena.close()
