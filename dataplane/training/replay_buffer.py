"""A replay buffer between producers and a trainer: admission of new work, storage, and selection of batches."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from dataplane.client.client import DataPlaneClient
from dataplane.core.arguments import whole_number
from dataplane.core.durations import as_timeout
from dataplane.core.schema import WEIGHT_VERSION
from dataplane.data.conditions import Where, conditions_of
from dataplane.data.meta import KVBatchMeta, list_of_names, name_of
from dataplane.errors import CallTimeoutError, RolloutAbortedError, first_few
from dataplane.training.staleness import TARGET_STEP, Flow, StalenessPolicy

FINISHED_AT = "finished_at"
"""Tag: when the sample was stored, in seconds since the epoch."""
GROUP = "group"
"""Tag that the samples of one group of a reservation share."""
EVICTED_AT_ONCE = 1 << 16
"""Number of samples that `advance` claims and clears at a time."""
COMMITTED = (WEIGHT_VERSION, ">=", 0)
"""Condition that excludes samples that a producer has put but `commit` has not tagged yet."""


@dataclass(eq=False)
class Reservation:
    """Permission to produce `sample_ids`, started with weights of `version`. As a context manager, it rolls itself
    back unless it was committed. `number` identifies it. `aborted`: the policy will not accept the samples; stop when
    convenient. `positions`: positions of the samples in the order of their starts (see `StalenessPolicy.target`).
    `storing`: `commit` is in progress. `watchers`: the callbacks of `when_aborted`."""

    number: int
    sample_ids: list[str]
    version: int
    positions: list[int]
    buffer: ReplayBuffer = field(repr=False)
    aborted: bool = False
    storing: bool = False
    committed: bool = False
    watchers: list[Callable[[], object]] = field(default_factory=list, repr=False)

    def when_aborted(self, stop: Callable[[], object]) -> None:
        """Register `stop()`, to be called once when the policy aborts this work, for example to end a running
        generation. It runs in the thread that calls `ReplayBuffer.advance`, which raises its exceptions. If the
        work is already aborted, it is called immediately."""
        self.buffer.watch(self, stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.buffer.rollback(self)


class ReplayBuffer:
    """Samples of one partition on their way from producers to the trainer, paced by `policy`.

    Producers call `reserve` before they start and `commit` with their results. The trainer calls `take` for batches
    and `advance` after each weight update. Use one buffer per job, shared by threads, in the driver or in an actor.
    The samples are stored in the service, once, by `commit` or by a producer in another process; the buffer holds
    only counts and names. The lock of `_changed` protects these; it is not held during calls of the service.

    partition_id: a registered partition that includes `task_name` in its tasks. group_size: reservations and
    batches consist of whole groups, whose samples share the tag `group`.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        partition_id: str,
        policy: StalenessPolicy,
        *,
        task_name: str = "train",
        required_fields: Sequence[str] = (),
        group_size: int | None = None,
    ) -> None:
        if group_size is not None and policy.batch_size % whole_number("group_size", group_size, 1):
            raise ValueError(f"batch_size={policy.batch_size}: must be a multiple of group_size={group_size}")
        self.policy = policy
        self._client = client
        self._partition = name_of("partition_id", partition_id)
        self._task = name_of("task_name", task_name)
        self._fields = list_of_names("required_fields", required_fields)
        self._group_size = group_size
        self._changed = threading.Condition()
        self._version = self._consumed = self._stored = 0  # see `Flow`
        self._next = self._next_position = 0  # number of the next sample id, and the next position (see `Reservation`)
        self._free_positions: list[int] = []  # a heap: positions of rolled-back samples
        self._running: dict[int, Reservation] = {}  # by `Reservation.number`, until the commit or rollback

    @property
    def flow(self) -> Flow:
        """The current progress of the run."""
        with self._changed:
            return self._flow()

    def _flow(self) -> Flow:
        running = sum(len(reservation.sample_ids) for reservation in self._running.values())
        return Flow(version=self._version, consumed=self._consumed, stored=self._stored, running=running)

    # --- producers

    def reserve(self, count: int, timeout_s: float | None = 60.0) -> Reservation:
        """Reserve the production of `count` samples. Wait until the policy admits them; after
        `timeout_s` (None: never), raise `CallTimeoutError` (a TimeoutError) with the current
        counts. Raise ValueError for a count that the policy can never admit."""
        timeout_s = as_timeout("timeout_s", timeout_s)
        # What the policy admits at most, when nothing is consumed, stored or running: the samples of these steps.
        most = (self.policy.window + 1) * self.policy.batch_size
        if whole_number("count", count, 1) > most or count % (self._group_size or 1):
            groups = "" if self._group_size is None else f", in whole groups of {self._group_size}"
            raise ValueError(f"reserve({count}): expected 1 to {most} samples{groups}")
        with self._changed:
            if not self._changed.wait_for(lambda: self.policy.headroom(self._flow()) >= count, timeout_s):
                flow = self._flow()
                what = f"reservation of {count} samples ({flow.stored} stored, {flow.running} running)"
                raise CallTimeoutError(what=what, waited_s=timeout_s, peer=f"the trainer (at version {flow.version})")
            return self._create_reservation(count)

    def reserve_nowait(self, count: int) -> Reservation | None:
        """Reserve `count` samples if the policy admits them now, else return None."""
        try:
            return self.reserve(count, 0.0)
        except CallTimeoutError:
            return None

    def _create_reservation(self, count: int) -> Reservation:
        """Create a reservation with new sample ids. It reuses the positions of rolled-back samples first. The caller
        holds the lock."""
        names = [f"{self._partition}-{number}" for number in range(self._next, self._next + count)]
        self._next += count
        positions = [heapq.heappop(self._free_positions) for _ in range(min(count, len(self._free_positions)))]
        new_positions = count - len(positions)
        positions += range(self._next_position, self._next_position + new_positions)
        self._next_position += new_positions
        reservation = Reservation(
            number=self._next,  # unique, because every reservation increases it
            sample_ids=names,
            version=self._version,
            positions=positions,
            buffer=self,
        )
        self._running[reservation.number] = reservation
        return reservation

    def commit(
        self,
        reservation: Reservation,
        fields: Mapping[str, Any] | KVBatchMeta,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """Store the produced samples: `fields` as in `put_samples`, `tags` one mapping per sample. They become
        visible atomically. After an error the reservation remains and can be committed again or rolled back.

        A producer in another process puts the samples itself, under the ids of the reservation, and passes the meta
        of its put as `fields`. No step takes these samples before this call has tagged them.

        Raise `RolloutAbortedError` if the policy aborted the work (samples that were already put are cleared), and
        the errors of the service.
        """
        put = fields if isinstance(fields, KVBatchMeta) else None  # the meta of a put by another process
        if put is not None and put.sample_ids != reservation.sample_ids:
            raise ValueError(
                f"the meta names samples {first_few(put.sample_ids)}, but the reservation has "
                f"{first_few(reservation.sample_ids)}; pass the meta of a put of these ids, in this order"
            )
        try:
            self._mark_storing(reservation)
        except RolloutAbortedError:
            with self._changed:
                # Unless aborted, the samples belong to another commit if it has stored them or is storing them.
                storing = self._running.get(reservation.number) is reservation
                discarded = reservation.aborted or not (storing or reservation.committed)
            if put is not None and discarded:
                self._client.clear_samples(put, self._partition)
            raise
        try:
            all_tags = self._complete_tags(reservation, tags)
            if put is not None:
                self._client.set_tags(put, self._partition, all_tags)
                meta = put.stamp_tags(all_tags)
            else:
                assert not isinstance(fields, KVBatchMeta)
                names = reservation.sample_ids
                meta = self._client.put_samples(names, self._partition, fields, tags=all_tags, mode="create")
        except BaseException:
            reservation.storing = False  # `commit` or `rollback` may be called again
            raise
        with self._changed:
            del self._running[reservation.number]
            reservation.committed = True
            reservation.storing = False
            self._stored += len(reservation.sample_ids)
            self._changed.notify_all()
        return meta

    def _mark_storing(self, reservation: Reservation) -> None:
        """Mark the reservation as being stored, so that the policy cannot abort it any longer. Raise
        `RolloutAbortedError` if it was aborted, rolled back or committed, or if another commit of it is in progress."""
        with self._changed:
            if reservation.aborted:
                why = f"started at weight version {reservation.version}; the trainer is at version {self._version}"
                raise RolloutAbortedError(samples=reservation.sample_ids, why=why)
            if reservation.storing:
                raise RolloutAbortedError(
                    samples=reservation.sample_ids, why="another commit of their reservation is in progress"
                )
            if self._running.get(reservation.number) is not reservation:
                raise RolloutAbortedError(
                    samples=reservation.sample_ids, why="their reservation was already rolled back or committed"
                )
            reservation.storing = True

    def _complete_tags(
        self, reservation: Reservation, tags: Sequence[Mapping[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """Return the producer's tags of each sample, with version, finish time and, if applicable, target step and
        group added."""
        now = time.time()
        given = [{} for _ in reservation.sample_ids] if tags is None else tags
        if len(given) != len(reservation.sample_ids):
            raise ValueError(
                f"got {len(given)} mappings of tags for {len(reservation.sample_ids)} samples; pass one per sample"
            )
        completed = []
        for row, (sample_tags, position) in enumerate(zip(given, reservation.positions, strict=True)):
            all_tags = {**sample_tags, WEIGHT_VERSION: reservation.version, FINISHED_AT: now}
            target = self.policy.target(position)
            if target is not None:
                all_tags[TARGET_STEP] = target
            if self._group_size is not None:
                all_tags[GROUP] = f"{reservation.number}-{row // self._group_size}"
            completed.append(all_tags)
        return completed

    def rollback(self, reservation: Reservation) -> None:
        """Cancel the reservation: its samples will not be produced. Their positions are given to other work, which may
        start instead, and samples that were already put are cleared. Do nothing after or during a commit. Idempotent.
        """
        with self._changed:
            if reservation.committed or reservation.storing:
                return
            if self._running.pop(reservation.number, None) is not None:  # None: it was rolled back before
                for position in reservation.positions:
                    heapq.heappush(self._free_positions, position)
                self._changed.notify_all()
        self._client.clear_samples(reservation.sample_ids, self._partition)

    def watch(self, reservation: Reservation, stop: Callable[[], object]) -> None:
        """See `Reservation.when_aborted`."""
        with self._changed:
            if not reservation.aborted:
                reservation.watchers.append(stop)
                return
        stop()  # without the lock, which `stop` may need

    # --- the trainer

    def take(self, timeout_s: float | None = 60.0) -> KVBatchMeta:
        """Return the batch of the next step, selected by the policy. Wait on the service; after
        `timeout_s` (None: never), raise TimeoutError naming what is missing, and take nothing."""
        deadline = time.monotonic() + as_timeout("timeout_s", timeout_s)
        conditions = self.policy.claims(self._version)  # in order of preference; one claim for each
        metas: list[KVBatchMeta] = []
        missing = self.policy.batch_size
        try:
            for number, where in enumerate(conditions, 1):
                is_last = number == len(conditions)  # only the last claim waits
                limit_s = max(deadline - time.monotonic(), 0.0) if is_last else 0.0
                if missing:  # otherwise skip the less preferred conditions
                    metas.append(self._claim(where, missing, blocking=is_last, timeout_s=limit_s))
                    missing -= metas[-1].size
        except BaseException:  # release the samples of the earlier claims
            for meta in metas:
                if meta.size:
                    self._client.nack(meta)
            raise
        taken = KVBatchMeta.concat(metas)
        with self._changed:
            self._stored -= taken.size
            self._consumed += taken.size
            self._changed.notify_all()
        return taken

    def _claim(self, where: Where, count: int, *, blocking: bool, timeout_s: float) -> KVBatchMeta:
        """Claim `count` committed samples that match `where`; fewer if `blocking` is false and fewer are ready."""
        return self._client.claim_meta(
            self._partition,
            self._task,
            self._fields,
            count,
            blocking=blocking,
            timeout_s=timeout_s,
            where=(*conditions_of(where), COMMITTED),
            group_by=GROUP,
            group_size=self._group_size,
        )

    def advance(self, version: int) -> tuple[int, list[Reservation]]:
        """Set the version of the trainer's weights; claims with `max_lag` are relative to it. Samples that the
        policy evicts are cleared. Work that it aborts is cancelled and its `Reservation.when_aborted` callbacks are
        called; other work may start. Return the number of evicted samples and the aborted reservations. ValueError
        if `version` decreases."""
        with self._changed:
            if version < self._version:
                raise ValueError(
                    f"advance({version}): the weights are already at version {self._version}, which cannot decrease"
                )
            self._version = version
            abortable = [each for each in self._running.values() if not (each.aborted or each.storing)]
            aborted = [each for each in abortable if self.policy.aborts(each.version, version)]
            for reservation in aborted:
                reservation.aborted = True
        # At its end the stack calls the callbacks, all of them even if one raises, and also after an error before that.
        with ExitStack() as callbacks:
            for reservation in aborted:
                for stop in reservation.watchers:
                    callbacks.callback(stop)
            for reservation in aborted:
                self.rollback(reservation)  # frees their positions for other work
            self._client.set_version(self._partition, version)
            evicted = self._evict(version)
            with self._changed:
                self._stored -= evicted
                self._changed.notify_all()
        return evicted, aborted

    def _evict(self, version: int) -> int:
        """Clear the samples that the policy evicts and return their number. Claim them first, so that samples of a
        step are never cleared."""
        where = self.policy.evicts(version)
        evicted = 0
        if where is None:  # the policy evicts nothing
            return evicted
        while True:
            old = self._client.claim_meta(
                self._partition, self._task, [], EVICTED_AT_ONCE, blocking=False, timeout_s=0.0, where=where
            )
            if not old.size:  # none are left
                return evicted
            self._client.clear_samples(old, self._partition)
            evicted += old.size

    # --- saving

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save together with a checkpoint of the service, as plain values. Running work is not
        included; it must be started again after loading."""
        with self._changed:
            # Running work starts again after loading, at the same positions: they are saved as free.
            running = [position for reservation in self._running.values() for position in reservation.positions]
            return {
                "version": self._version,
                "consumed": self._consumed,
                "stored": self._stored,
                "next": self._next,
                "next_position": self._next_position,
                "free_positions": sorted([*self._free_positions, *running]),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, and set its version at the service. RuntimeError while work is running."""
        with self._changed:
            if self._running:
                raise RuntimeError(
                    f"{len(self._running)} reservations are not committed yet; roll them back before load_state_dict"
                )
            self._version, self._consumed, self._stored = state["version"], state["consumed"], state["stored"]
            self._next, self._next_position = state["next"], state["next_position"]
            self._free_positions = list(state["free_positions"])
            heapq.heapify(self._free_positions)
            self._changed.notify_all()
        self._client.set_version(self._partition, state["version"])
