"""The protocol of messages whose tensors travel by process groups of their devices. For the I/O thread only.

    sender                                          receiver
    PostMessage with `offer`  ------------------->  queued, or matched with a waiting receive
    <-------------  Ready                           a receive took the message, and names its device
    Transfer        ------------->                  both ends take part in a broadcast of the process group
    SharedValues    ------------->                  on the sender's device: the receiver copies from its memory
    HostValues      ------------->                  the receiver has no such device: host memory has the values

The sender decides the order of the transfers of a group, and posts one only when its receivers are ready: a broadcast
waits for all of them. So nobody waits in a collective for a message that is not received, whichever end sends first.
A group has one sender, and both directions of a pair are two groups. A transfer that fails is an error at both ends
(FailedMessage or RefusedMessage), as are the other transfers of its group; the next message makes a new group. Workers
with the same device share its memory through CUDA IPC.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from dataplane.core import devices
from dataplane.errors import DataPlaneError
from workers.errors import DeviceTransferError
from workers.messages.collectives import (
    CONNECT_S,
    JOIN_S,
    CollectiveGroup,
    DeviceValues,
    Done,
    Membership,
    Outcome,
    Road,
    device_id_of,
)
from workers.messages.deliveries import MessageId
from workers.messages.fetches import Fetch, Reply
from workers.messages.group_store import StoreServer
from workers.messages.outgoing import OutgoingMessages, Sending
from workers.messages.shared_buffers import OwnSlab, Slabs
from workers.messages.snapshots import ValueSnapshot
from workers.messages.wire import (
    DeviceId,
    FailedMessage,
    ForReceiver,
    ForSender,
    HostValues,
    Ready,
    RefusedMessage,
    SharedMemory,
    SharedValues,
    Transfer,
    incarnations,
)
from workers.transport.encoding import carried
from workers.transport.pickling import Unpacked, tensors_of

Tell = Callable[..., None]
"""Sends a message to a peer: its name, the class of the message, and its fields besides those of both ends."""


class Collectives:
    """The process groups of this worker, of both directions. host: at which other members reach this one; timeout_s: of
    a transfer; call: calls a function in the I/O thread. `_collectives`: by their members, device and options where
    this worker sends, by name where it receives. A closed group is kept until the next one replaces it,
    or its sender is lost: the transfers that its sender still announces fail."""

    def __init__(self, host: str, road: Road, timeout_s: float, *, call: Callable[[Callable[[], None]], None]) -> None:
        self.host = host
        self.road = road
        self.call = call
        self._store: StoreServer | None = None
        self._timeout_s = timeout_s
        self._collectives: dict[Hashable, CollectiveGroup] = {}

    def find(self, key: Hashable) -> CollectiveGroup | None:
        return self._collectives.get(key)

    def store(self) -> StoreServer:
        """Return the store of the groups in which this worker sends, opened by the first call. OSError if it cannot be
        opened."""
        if self._store is None or self._store.error is not None:
            self._store = StoreServer(self.host, min(CONNECT_S, self._timeout_s))
        return self._store

    def open(self, key: Hashable, membership: Membership) -> CollectiveGroup:
        collective = self._collectives[key] = CollectiveGroup(membership, self._timeout_s)
        return collective

    def run(self, collective: CollectiveGroup, values: DeviceValues | int, done: Done) -> None:
        """Send values to the group, or receive this number of bytes. `done` gets the outcome, in the I/O thread."""
        collective.submit(values, lambda outcome: self.call(partial(done, outcome)))

    def end_with(self, peer: str) -> None:
        """Close all groups with a peer that is lost or restarted: their transfers fail."""
        for key, collective in list(self._collectives.items()):
            if peer in collective.membership.peers:
                del self._collectives[key]
                collective.close(f"{peer} is gone or was restarted")

    def close(self) -> None:
        """Close all groups, and wait for their threads, at most `JOIN_S`."""
        until = time.monotonic() + JOIN_S
        for collective in self._collectives.values():
            collective.close("this worker ends")
        for collective in self._collectives.values():
            collective.join(until - time.monotonic())
        if self._store is not None:
            self._store.close()


class TransferSource:
    """The messages with `offer` that this worker sends. worker: its name. `_numbers`: for the names of groups."""

    def __init__(
        self,
        worker: str,
        outgoing: OutgoingMessages,
        slabs: Slabs,
        collectives: Collectives,
        tell: Tell,
    ) -> None:
        self._worker = worker
        self._outgoing = outgoing
        self._slabs = slabs
        self._collectives = collectives
        self._tell = tell
        self._prefix = f"{worker}/{uuid.uuid4().hex}"  # unlike that of an earlier process of this worker
        self._numbers = itertools.count(1)

    def handle_ready(self, peer: str, ready: Ready) -> None:
        """Send the values to a receiver without such a device, or on this worker's, which collectives do not reach. The
        others get theirs together, once all receivers of the message are ready."""
        sending = self._outgoing.message_to_pull(peer, ready)
        if sending is None or sending.snapshot.on_device is None:
            return
        snapshot = sending.snapshot
        values = sending.snapshot.on_device
        snapshot.ready.append((sending, ready.device_id))
        if ready.device_id is None:
            self._send_host(sending)
        elif _same_device(ready.device_id, values.device_id):
            self._share(sending, ready.device_id, values)
        self.begin_if_all_ready(snapshot)

    def begin_if_all_ready(self, snapshot: ValueSnapshot) -> None:
        """Begin the transfer if all receivers that have not failed are ready: to all together, or to each if some of
        them share a device."""
        values = snapshot.on_device
        ready = [(sending, device_id) for sending, device_id in snapshot.ready if self._is_pending(sending)]
        if values is None or len(ready) < snapshot.pending:
            return
        snapshot.ready = []
        apart = [
            (sending, device_id)
            for sending, device_id in ready
            if device_id is not None and not _same_device(device_id, values.device_id)
        ]
        apart.sort(key=lambda each: each[0].to)
        if len({device_id.uuid or sending.to for sending, device_id in apart}) == len(apart):
            together = [apart] if apart else []
        else:
            together = [[each] for each in apart]
        for members in together:
            self._begin(members, values)

    def _begin(self, ready: list[tuple[Sending, DeviceId]], values: DeviceValues) -> None:
        """Begin one transfer to these receivers."""
        sendings = [sending for sending, _ in ready]
        try:
            collective = self._collective_of(ready, values.flat.device)
        except Exception as error:  # no file descriptor for the store, or no thread for the group
            self._fail_all(sendings, error)
            return
        for rank, (sending, device_id) in enumerate(ready, 1):
            sending.collective = collective
            self._tell(
                sending.to,
                Transfer,
                stream=sending.stream,
                sequence=sending.sequence,
                collective=collective.name,
                store=collective.membership.store,
                rank=rank,
                size=collective.membership.size,
                device=device_id.device,
                options=collective.membership.options,
                nbytes=values.flat.numel(),
            )
        self._collectives.run(collective, values, partial(self._done, collective, sendings))

    def _collective_of(self, ready: list[tuple[Sending, DeviceId]], device: torch.device) -> CollectiveGroup:
        """Return the group of this worker and these receivers, made on first contact and after a failure. OSError or
        RuntimeError if it cannot be made."""
        first = ready[0][0]
        options = self._outgoing.contact(first.to, first.stream, first.options).options
        key = (tuple((each.to, device_id) for each, device_id in ready), device, options)
        collective = self._collectives.find(key)
        if collective is not None and not collective.closed:
            return collective
        store = self._collectives.store()
        membership = Membership(
            name=f"{self._prefix}/{next(self._numbers)}",
            store=store.address,
            rank=0,
            size=1 + len(ready),
            device=device,
            options=options,
            host=self._collectives.host,
            peers=frozenset(each.to for each, _ in ready),
            server=store,
        )
        return self._collectives.open(key, membership)

    def _done(self, collective: CollectiveGroup, sendings: list[Sending], outcome: Outcome) -> None:
        if isinstance(outcome, Exception):
            collective.close(repr(outcome))
            self._fail_all(sendings, outcome)

    def _fail_all(self, sendings: list[Sending], why: Exception) -> None:
        for sending in sendings:
            self.fail(sending.to, sending, DeviceTransferError(what=sending.what, why=repr(why)))

    def _share(self, sending: Sending, device_id: DeviceId, values: DeviceValues) -> None:
        """Let a receiver on this worker's device copy the values."""
        try:
            memory = share(values)
        except Exception as error:  # the device or its allocator does not support it
            self._fail_all([sending], error)
            return
        self._tell(
            sending.to,
            SharedValues,
            stream=sending.stream,
            sequence=sending.sequence,
            device=device_id.device,
            nbytes=values.flat.numel(),
            memory=memory,
        )

    def _send_host(self, sending: Sending) -> None:
        """Tell the receiver where in host memory the values are, once they are there. The first call copies them."""
        snapshot = sending.snapshot
        if snapshot.on_host is None:
            copied: Future[OwnSlab] = Future()
            name = f"tq-to-host-{self._worker}"
            args = (snapshot, snapshot.on_device, copied)
            threading.Thread(target=self._copy_to_host, args=args, name=name).start()
            snapshot.on_host = copied
        snapshot.on_host.add_done_callback(
            lambda copied: self._collectives.call(partial(self._tell_host, sending, copied))
        )

    def _copy_to_host(self, snapshot: ValueSnapshot, values: DeviceValues, copied: Future[OwnSlab]) -> None:
        """Copy values into a slab. In a thread of its own."""
        slab = None
        try:
            slab = self._slabs.take(snapshot.layout.nbytes)
            skeleton_from = snapshot.layout.skeleton_from
            values.copy_to(torch.from_numpy(slab.memory[:skeleton_from]))
            slab.memory[skeleton_from : snapshot.layout.nbytes] = np.frombuffer(snapshot.inline.buffer, np.uint8)
        except Exception as error:  # no memory, or the device failed
            if slab is not None:
                self._slabs.give_back(slab)
            copied.set_exception(error)
            return
        if not snapshot.add_slab(slab):
            self._slabs.give_back(slab)
        copied.set_result(slab)

    def _tell_host(self, sending: Sending, copied: Future[OwnSlab]) -> None:
        error = copied.exception()
        if error is not None:
            what = f"the copy of {sending.snapshot.layout.nbytes:,} bytes to host memory failed: {error!r}"
            self.fail(sending.to, sending, DeviceTransferError(what=sending.what, why=what))
        elif self._is_pending(sending):
            slab = copied.result().name
            self._tell(sending.to, HostValues, stream=sending.stream, sequence=sending.sequence, slab=slab)

    def handle_refusal(self, peer: str, refused: RefusedMessage) -> None:
        """Close the group of a message whose receiver failed in its transfer, which the other members wait for."""
        sending = self._outgoing.message_to_pull(peer, refused)
        if sending is not None and sending.collective is not None:
            sending.collective.close(f"{peer} reports {refused.error}: {refused.facts.get('why', '')}")

    def fail(self, peer: str, message: ForSender | Sending, error: DataPlaneError) -> None:
        """Fail a sent message, if its receiver has neither received nor refused it, at both ends."""
        if self._outgoing.give_up(peer, message, error):
            self._tell(peer, FailedMessage, stream=message.stream, sequence=message.sequence, **carried(error))

    def _is_pending(self, sending: Sending) -> bool:
        """Whether the receiver is alive and has neither received nor refused the message."""
        return self._outgoing.message_to_pull(sending.to, sending) is sending


class TransferReceiver:
    """The messages with `offer` that this worker receives. reply: sends an answer along a message's route; find:
    returns the fetch of a message; finish: called with a fetch whose message is complete; fail: fails a message at both
    ends."""

    def __init__(
        self,
        collectives: Collectives,
        reply: Reply,
        find: Callable[[MessageId], Fetch | None],
        finish: Callable[[Fetch], None],
        fail: Callable[[ForReceiver, DataPlaneError], None],
    ) -> None:
        self._collectives = collectives
        self._reply = reply
        self._find = find
        self._finish = finish
        self._fail = fail

    def request(self, fetch: Fetch) -> None:
        """Tell the sender that a receive has taken its message, and on which device it receives. A process cannot open
        its own memory, so two workers of one process on one device use host memory."""
        arrival = fetch.arrival
        posting = fetch.posting
        post = arrival.post
        assert post.offer is not None, arrival.id
        assert posting is not None, arrival.id
        device = self._collectives.road.receiving_device(post.offer, posting.target, posting.device)
        device_id = None if device is None else device_id_of(device)
        if (
            device_id is not None
            and _same_device(device_id, post.offer)
            and device_id.process == post.offer.process != ""
        ):
            device_id = None
        self._reply(arrival.route, Ready(stream=post.stream, sequence=post.sequence, device_id=device_id))

    def begin(self, transfer: Transfer | SharedValues) -> None:
        """Take part in a transfer, also if the receive has given up: the other members wait for this one, or the sender
        for the end of the shared memory."""
        if isinstance(transfer, SharedValues):
            name = f"tq-from-{transfer.source}"
            threading.Thread(target=self._copy_shared, args=(transfer,), name=name, daemon=True).start()
            return
        collective = self._collectives.find(transfer.collective)
        if collective is None:
            collective = self._collectives.open(transfer.collective, self._membership(transfer))
        fetch = self._find((transfer.source, transfer.stream, transfer.sequence))
        if fetch is not None:
            fetch.collective = collective
        self._collectives.run(collective, transfer.nbytes, partial(self._done, transfer, collective))

    def _copy_shared(self, shared: SharedValues) -> None:
        """Copy values from the sender's memory. In a thread of its own."""
        outcome: Outcome
        try:
            outcome = copy_of(shared.memory, shared.nbytes, torch.device(shared.device))
        except Exception as error:  # for example: the processes cannot see each other
            outcome = error
        self._collectives.call(partial(self._done, shared, None, outcome))

    def _membership(self, transfer: Transfer) -> Membership:
        return Membership(
            name=transfer.collective,
            store=transfer.store,
            rank=transfer.rank,
            size=transfer.size,
            device=torch.device(transfer.device),
            options=transfer.options,
            host=self._collectives.host,
            peers=frozenset([transfer.source]),
        )

    def _done(self, transfer: Transfer | SharedValues, collective: CollectiveGroup | None, outcome: Outcome) -> None:
        """Complete a fetch with the received bytes, or fail its message."""
        if isinstance(outcome, Exception):
            if collective is not None:
                collective.close(repr(outcome))
            what = f"receive of a message of {transfer.source}"
            self._fail(transfer, DeviceTransferError(what=what, why=repr(outcome)))
            return
        fetch = self._find((transfer.source, transfer.stream, transfer.sequence))
        if fetch is None or incarnations(fetch.arrival.post) != incarnations(transfer):
            return
        arrival = fetch.arrival
        arrival.unpacked = Unpacked(arrival.skeleton, tensors_of(arrival.post.layout, outcome))
        self._finish(fetch)


def _same_device(a: DeviceId, b: DeviceId) -> bool:
    return bool(a.uuid) and a.uuid == b.uuid


def share(values: DeviceValues) -> SharedMemory:
    """Share the memory of the values with one other process, which must open it. Until then, or until this process
    ends, torch keeps the memory. RuntimeError if the device or its allocator does not support that."""
    storage = values.flat.untyped_storage()
    device = values.flat.device
    if device.type != "cuda":
        raise RuntimeError(f"{device.type} devices cannot share memory between processes")
    with torch.cuda.device(device):
        if values.ready is not None:
            devices.current_stream(device).wait_event(values.ready)  # torch's event follows the current stream
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # what other processes have closed
        _, *facts = storage._share_cuda_()  # type: ignore[no-untyped-call]
    return SharedMemory(*facts)


def copy_of(memory: SharedMemory, nbytes: int, device: torch.device) -> Tensor:
    """Open the memory, on `device` of this process, and return a copy of the values, uint8 `[nbytes]`. Blocks until
    the copy is complete. RuntimeError if this process cannot open it, for example because it is the owner."""
    with torch.cuda.device(device):
        storage: Any = torch.UntypedStorage._new_shared_cuda(device.index, *msgspec.structs.astuple(memory))
        values = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))
        copy = values.clone()
        torch.cuda.current_stream(device).synchronize()
    return copy
