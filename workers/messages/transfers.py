"""The protocol of messages whose tensors travel by process groups of their devices. For the I/O thread only.

    sender                                          receiver
    PostMessage with `offer`  ------------------->  queued, or matched with a waiting receive
    <-------------  Ready                           a receive took the message, and names its device
    Transfer        ------------->                  both ends take part in a broadcast of the process group
    SharedValues    ------------->                  on the sender's device: the receiver copies from its memory
    <-------------  WantHost                        no such device, or the process group failed
    HostValues      ------------->                  the values are in host memory now, as without `offer`
    FailedMessage   ------------->                  the values cannot be sent

The sender decides the order of the transfers of a group, and posts one only when its receivers are ready. So nobody
waits in a collective for a message that is not received, whichever end sends first. A group has one sender, and both
directions of a pair are two groups. If a group fails, its messages travel through host memory, and so do all later
ones of these workers until one of them restarts. Workers with the same device share its memory through CUDA IPC.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from dataplane.core import devices
from dataplane.errors import DataPlaneError, InternalError
from workers.messages.collectives import (
    CONNECT_S,
    JOIN_S,
    CollectiveGroup,
    DeviceValues,
    Done,
    Membership,
    Outcome,
    Road,
    place_of,
)
from workers.messages.deliveries import MessageId
from workers.messages.fetches import Fetch, Reply
from workers.messages.group_store import StoreServer
from workers.messages.outgoing import OutgoingMessages, Sending
from workers.messages.relays import Schedule
from workers.messages.shared_buffers import OwnSlab, Slabs
from workers.messages.snapshots import ValueSnapshot
from workers.messages.wire import (
    EndGroup,
    FailedMessage,
    ForSender,
    HostValues,
    Place,
    Ready,
    SharedMemory,
    SharedValues,
    Transfer,
    WantHost,
    incarnations,
)
from workers.transport.encoding import carried
from workers.transport.pickling import Unpacked, tensors_of

GATHER_S = 1.0
"""The receivers of a broadcast that are ready within this time of the first one get it together, if all are."""
ENDED_MOST = 1024
"""Most names of ended groups that are remembered. A transfer of a forgotten one waits `CONNECT_S` before it fails."""

Tell = Callable[..., None]
"""Sends a message to a peer: its name, the class of the message, and its fields besides those of both ends."""
_log = logging.getLogger(__name__)


class Groups:
    """The process groups of this worker, of both directions. host: at which other members reach this one; timeout_s: of
    a transfer; schedule, call: call a function in the I/O thread, after some seconds or now. `_ended`: names of the
    groups that ended last; `_watched`: names of the groups for which a timer runs."""

    def __init__(
        self,
        host: str,
        road: Road,
        timeout_s: float,
        *,
        schedule: Schedule,
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        self.host = host
        self.road = road
        self._store: StoreServer | None = None
        self._timeout_s = timeout_s
        self.schedule = schedule
        self.call = call
        self._groups: dict[str, CollectiveGroup] = {}
        self._ended: deque[str] = deque(maxlen=ENDED_MOST)
        self._watched: set[str] = set()

    def get(self, name: str) -> CollectiveGroup | None:
        return self._groups.get(name)

    def has_ended(self, name: str) -> bool:
        return name in self._ended

    def store(self) -> StoreServer:
        """Return the store of the groups in which this worker sends, opened by the first call. OSError if it cannot be
        opened."""
        if self._store is None or self._store.error is not None:
            self._store = StoreServer(self.host, min(CONNECT_S, self._timeout_s))
        return self._store

    def open(self, membership: Membership) -> CollectiveGroup:
        group = self._groups[membership.name] = CollectiveGroup(membership, self._timeout_s)
        return group

    def run(self, group: CollectiveGroup, values: DeviceValues | int, done: Done) -> None:
        """Send values to the group, or receive this number of bytes. `done` gets the outcome, in the I/O thread."""
        group.submit(values, lambda outcome: self.call(partial(done, outcome)))
        if group.name not in self._watched:
            self._watched.add(group.name)
            self._watch(group)

    def _watch(self, group: CollectiveGroup) -> None:
        """Close the group if it does not connect within `CONNECT_S`, or a transfer takes longer than the timeout."""
        limit_s = self._timeout_s if group.connected else min(CONNECT_S, self._timeout_s)
        self.schedule(limit_s, partial(self._check_progress, group, (group.finished, group.connected)))

    def _check_progress(self, group: CollectiveGroup, before: tuple[int, bool]) -> None:
        if group.finished == group.submitted or self.get(group.name) is not group:
            self._watched.discard(group.name)
        elif before == (group.finished, group.connected):
            self._watched.discard(group.name)
            group.close()  # its transfers fail
        else:
            self._watch(group)

    def end(self, name: str) -> CollectiveGroup | None:
        """Close a group, and return it. None if it has ended before. Its transfers fail."""
        group = self._groups.pop(name, None)
        if group is not None:
            self._ended.append(name)
            group.close()
        return group

    def end_with(self, peer: str) -> list[CollectiveGroup]:
        """End and return all groups with a peer that is lost or restarted."""
        self.road.host_only.discard(peer)
        groups = [group for group in self._groups.values() if peer in group.membership.peers]
        for group in groups:
            self.end(group.name)
        return groups

    def close(self) -> None:
        """End all groups, and wait for their threads, at most `JOIN_S`."""
        until = time.monotonic() + JOIN_S
        for group in [self.end(name) for name in list(self._groups)]:
            if group is not None:
                group.join(until - time.monotonic())
        if self._store is not None:
            self._store.close()


class TransferSource:
    """The messages with `offer` that this worker sends. worker: its name. `_by_key`: the groups by their members in the
    order of ranks, device and options; `_numbers`: for the names of groups."""

    def __init__(
        self,
        worker: str,
        outgoing: OutgoingMessages,
        slabs: Slabs,
        groups: Groups,
        tell: Tell,
    ) -> None:
        self._worker = worker
        self._outgoing = outgoing
        self._slabs = slabs
        self._groups = groups
        self._tell = tell
        self._by_key: dict[Any, str] = {}
        self._prefix = f"{worker}/{uuid.uuid4().hex}"  # unlike that of an earlier process of this worker
        self._numbers = itertools.count(1)

    # --- collectives ------------------------------------------------------------------------------------------------

    def handle_ready(self, peer: str, ready: Ready) -> None:
        """Begin the transfer to a receiver. A broadcast waits until all its receivers are ready, at most `GATHER_S`."""
        sending = self._outgoing.message_to_pull(peer, ready)
        if sending is None or sending.snapshot.on_device is None:
            return
        snapshot = sending.snapshot
        if peer in self._groups.road.host_only:
            self._send_host(sending)
            return
        late, snapshot.ready = snapshot.ready is None, [*(snapshot.ready or []), (sending, ready.place)]
        if late or len(snapshot.ready) == snapshot.receivers:
            self._begin_gathered(snapshot)
        elif len(snapshot.ready) == 1:
            self._groups.schedule(GATHER_S, partial(self._begin_gathered, snapshot))

    def _begin_gathered(self, snapshot: ValueSnapshot) -> None:
        """Begin the transfer to the receivers that are ready: to all together, or to each if some are missing or share
        a device. Those on this worker's device copy the values themselves, because collectives do not reach them."""
        ready, snapshot.ready = [each for each in snapshot.ready or [] if self._is_pending(each[0])], None
        if snapshot.on_device is None:  # the receivers are lost
            return
        ours = snapshot.on_device.place.uuid
        apart = [each for each in ready if not ours or each[1].uuid != ours]
        devices = {place.uuid or each.to for each, place in apart}
        if apart and len(ready) == snapshot.receivers and len(devices) == len(apart):
            self._begin(sorted(apart, key=lambda each: each[0].to), snapshot.on_device)
        else:
            for each in apart:
                self._begin([each], snapshot.on_device)
        for sending, place in ready:
            if ours and place.uuid == ours:
                self._share(sending, place, snapshot.on_device)

    def _share(self, sending: Sending, place: Place, values: DeviceValues) -> None:
        """Let a receiver on this worker's device copy the values."""
        try:
            memory = share(values)
        except Exception as error:  # the device or its allocator does not support it
            self._use_host_memory([sending.to], error)
            self._send_host(sending)
            return
        sending.told = True
        self._tell(
            sending.to,
            SharedValues,
            stream=sending.stream,
            number=sending.number,
            device=place.device,
            nbytes=values.flat.numel(),
            memory=memory,
        )

    def _begin(self, ready: list[tuple[Sending, Place]], values: DeviceValues) -> None:
        """Begin one transfer to these receivers."""
        try:
            group = self._group_of(ready, values.flat.device)
        except Exception as error:  # no file descriptor for the store, or no thread for the group
            self._use_host_memory([sending.to for sending, _ in ready], error)
            for sending, _ in ready:
                self._send_host(sending)
            return
        for rank, (sending, place) in enumerate(ready, 1):
            sending.told = True
            self._tell(
                sending.to,
                Transfer,
                stream=sending.stream,
                number=sending.number,
                group=group.name,
                store=group.membership.store,
                rank=rank,
                size=group.membership.size,
                device=place.device,
                options=group.membership.options,
                nbytes=values.flat.numel(),
            )
        self._groups.run(group, values, partial(self._done, group.name))

    def _group_of(self, ready: list[tuple[Sending, Place]], device: torch.device) -> CollectiveGroup:
        """Return the group of this worker and these receivers, made on first contact. OSError or RuntimeError if it
        cannot be made."""
        first = ready[0][0]
        options = self._outgoing.contact(first.to, first.stream, first.options).options
        key = (tuple((each.to, place) for each, place in ready), device, options)
        group = self._groups.get(self._by_key.get(key, ""))
        if group is None:
            store = self._groups.store()
            membership = Membership(
                name=f"{self._prefix}/{next(self._numbers)}",
                store=store.address,
                rank=0,
                size=1 + len(ready),
                device=device,
                options=options,
                host=self._groups.host,
                peers=frozenset(each.to for each, _ in ready),
                server=store,
            )
            group = self._groups.open(membership)
            self._by_key = {key: name for key, name in self._by_key.items() if self._groups.get(name) is not None}
            self._by_key[key] = group.name
        return group

    def _done(self, name: str, outcome: Outcome) -> None:
        if isinstance(outcome, Exception):
            self._fail_group(name, outcome)

    def end_with(self, peer: str) -> None:
        """End all groups with a peer that is lost or restarted, also at their other members, whose messages of these
        groups travel through host memory."""
        for group in self._groups.end_with(peer):
            if group.membership.rank == 0:
                for other in group.membership.peers - {peer}:
                    self._tell(other, EndGroup, group=group.name)

    def _fail_group(self, name: str, why: object) -> None:
        """End a group that failed, at all of its members. Their messages travel through host memory."""
        group = self._groups.end(name)
        if group is None:  # it has ended before
            return
        self._use_host_memory(group.membership.peers, why)
        for peer in group.membership.peers:
            self._tell(peer, EndGroup, group=name)

    # --- host memory ------------------------------------------------------------------------------------------------

    def _use_host_memory(self, peers: Iterable[str], why: object) -> None:
        """Send all later messages to these peers through host memory."""
        _log.warning(
            "Worker %s: tensors for %s travel through host memory from now on, because the way by devices failed: %s",
            self._worker,
            ", ".join(sorted(peers)),
            why,
        )
        self._groups.road.host_only.update(peers)

    def handle_want_host(self, peer: str, want: WantHost) -> None:
        """Send the values of a message through host memory. So do all later ones to that peer, unless the group ended
        because another member was lost."""
        if want.group:
            self._fail_group(want.group, f"{peer} reports: {want.why}")
        else:
            self._groups.road.host_only.add(peer)
        sending = self._outgoing.message_to_pull(peer, want)
        if sending is not None:
            self._send_host(sending)

    def send_all_host(self) -> None:
        """Copy the values that no receiver has asked for to host memory, where receivers on this host can read them
        after this worker's end."""
        for sending in list(self._outgoing.sent()):
            if sending.snapshot.on_device is not None and not (sending.kept or sending.told):
                sending.told = True
                self._send_host(sending)

    def _send_host(self, sending: Sending) -> None:
        """Tell the receiver where in host memory the values are, after copying them if needed."""
        snapshot = sending.snapshot
        if snapshot.slab is not None:
            self._tell_slab(sending, snapshot.slab)
        elif snapshot.on_device is not None:
            snapshot.want_host.append(sending)
            if len(snapshot.want_host) == 1:
                name, values = f"tq-to-host-{self._worker}", snapshot.on_device
                try:
                    threading.Thread(target=self._copy_to_host, args=(snapshot, values), name=name).start()
                except RuntimeError as error:  # the system starts no more threads
                    self._fail_waiting(snapshot, error)

    def _copy_to_host(self, snapshot: ValueSnapshot, values: DeviceValues) -> None:
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
            self._groups.call(partial(self._fail_waiting, snapshot, error))
        else:
            self._groups.call(partial(self._tell_waiting, snapshot, slab))

    def _fail_waiting(self, snapshot: ValueSnapshot, error: Exception) -> None:
        """Fail a message for the receivers that wait for its values in host memory."""
        waiting, snapshot.want_host = snapshot.want_host, []
        for sending in waiting:
            what = f"{sending.what}: cannot copy {snapshot.layout.nbytes:,} bytes to host memory: {error!r}"
            self.fail(sending.to, sending, InternalError(what=what))

    def _tell_waiting(self, snapshot: ValueSnapshot, slab: OwnSlab) -> None:
        if not snapshot.add_slab(slab):
            self._slabs.give_back(slab)
            return
        for sending in snapshot.want_host:
            if self._is_pending(sending):
                self._tell_slab(sending, slab)
        snapshot.want_host.clear()

    def _tell_slab(self, sending: Sending, slab: OwnSlab) -> None:
        self._tell(sending.to, HostValues, stream=sending.stream, number=sending.number, slab=slab.name)

    def fail(self, peer: str, message: ForSender | Sending, error: DataPlaneError) -> None:
        """Fail a sent message, if its receiver has neither received nor refused it, at both ends."""
        if self._outgoing.give_up(peer, message, error):
            self._tell(peer, FailedMessage, stream=message.stream, number=message.number, **carried(error))

    def _is_pending(self, sending: Sending) -> bool:
        """Whether the receiver is alive and has neither received nor refused the message."""
        return self._outgoing.message_to_pull(sending.to, sending) is sending


class TransferReceiver:
    """The messages with `offer` that this worker receives. reply: sends an answer along a message's route; find:
    returns the fetch of a message; finish: called with a fetch whose message is complete."""

    def __init__(
        self,
        groups: Groups,
        reply: Reply,
        find: Callable[[MessageId], Fetch | None],
        finish: Callable[[Fetch], None],
    ) -> None:
        self._groups = groups
        self._reply = reply
        self._find = find
        self._finish = finish

    def request(self, fetch: Fetch) -> None:
        """Tell the sender that a receive has taken its message."""
        arrival, posting = fetch.arrival, fetch.posting
        post = arrival.post
        assert post.offer is not None, arrival.id
        assert posting is not None, arrival.id
        device = self._groups.road.receiving_device(post.offer, posting.target, posting.device)
        if device is None:
            why = f"it has no device for tensors of {post.offer.device}"
            self._reply(arrival.route, WantHost(stream=post.stream, number=post.number, group="", why=why))
        else:
            self._reply(arrival.route, Ready(stream=post.stream, number=post.number, place=place_of(device)))

    def begin(self, route: bytes, transfer: Transfer | SharedValues) -> None:
        """Take part in a transfer, also if the receive has given up: the other members wait for this one, or the sender
        for the end of the shared memory."""
        if isinstance(transfer, SharedValues):
            name = f"tq-from-{transfer.source}"
            try:
                threading.Thread(target=self._copy_shared, args=(route, transfer), name=name, daemon=True).start()
            except RuntimeError as error:  # the system starts no more threads
                self._want_host(route, transfer, repr(error))
            return
        group = self._groups.get(transfer.group)
        if group is None and self._groups.has_ended(transfer.group):
            self._want_host(route, transfer, "the process group has ended")
            return
        try:
            group = group or self._groups.open(self._membership(transfer))
        except Exception as error:  # no thread for the group
            self._want_host(route, transfer, repr(error))
            return
        self._groups.run(group, transfer.nbytes, partial(self._done, route, transfer))

    def _copy_shared(self, route: bytes, shared: SharedValues) -> None:
        """Copy values from the sender's memory. In a thread of its own."""
        outcome: Outcome
        try:
            outcome = copy_of(shared.memory, shared.nbytes, torch.device(shared.device))
        except Exception as error:  # for example: the processes cannot see each other
            outcome = error
        self._groups.call(partial(self._done, route, shared, outcome))

    def _membership(self, transfer: Transfer) -> Membership:
        return Membership(
            name=transfer.group,
            store=transfer.store,
            rank=transfer.rank,
            size=transfer.size,
            device=torch.device(transfer.device),
            options=transfer.options,
            host=self._groups.host,
            peers=frozenset([transfer.source]),
        )

    def _done(self, route: bytes, transfer: Transfer | SharedValues, outcome: Outcome) -> None:
        """Complete a fetch with the received bytes, or request them through host memory."""
        if isinstance(outcome, Exception):
            if isinstance(transfer, Transfer):
                self._groups.end(transfer.group)
            self._want_host(route, transfer, f"{type(outcome).__name__}: {outcome}")
            return
        fetch = self._find((transfer.source, transfer.stream, transfer.number))
        if fetch is None or incarnations(fetch.arrival.post) != incarnations(transfer):
            return
        arrival = fetch.arrival
        arrival.unpacked = Unpacked(arrival.skeleton, tensors_of(arrival.post.layout, outcome))
        self._finish(fetch)

    def _want_host(self, route: bytes, transfer: Transfer | SharedValues, why: str) -> None:
        group = transfer.group if isinstance(transfer, Transfer) else ""
        self._reply(route, WantHost(stream=transfer.stream, number=transfer.number, group=group, why=why))


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
