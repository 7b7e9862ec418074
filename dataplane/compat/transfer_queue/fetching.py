"""Claim batches for tasks. The service lists the ready samples, a sampler chooses among them, and the service claims
exactly that choice. If another process claimed one of these samples first, the choice is repeated."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from dataplane.client.operations import get
from dataplane.client.operations.sample_names import samples_of
from dataplane.client.operations.steps import Operation, Send
from dataplane.client.session_state import SessionState
from dataplane.compat.transfer_queue.errors import FetchTimeoutError, RefusedCallError
from dataplane.compat.transfer_queue.metadata import BatchMeta
from dataplane.compat.transfer_queue.operations import ADAPTER, MAX_SAMPLES, batch_of, extend, listed, named, put
from dataplane.compat.transfer_queue.samplers import (
    LENGTH_TAG,
    NAMED,
    BaseSampler,
    Draw,
    DrawingSampler,
    Lengths,
    SequentialSampler,
)
from dataplane.compat.transfer_queue.tags import tags_of
from dataplane.errors import (
    ClaimTimeoutError,
    NotFoundError,
    PartitionNotFoundError,
    SampleExistsError,
    TaskNotFoundError,
)
from dataplane.ledger import commands as c

DRAW = "draw"
"""The field of a sample that stores a draw."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How `get_meta` samples. wait_s: how long it waits for enough samples. polling: return an empty meta instead of
    waiting."""

    sampler: BaseSampler = field(default_factory=SequentialSampler)
    polling: bool = False
    wait_s: float = 5.0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request of a task for a batch."""

    partition: str
    task: str
    fields: tuple[str, ...]
    batch_size: int
    config: Mapping[str, Any]


class PartitionView:
    """A sampler's view of the partition: the tags of the ready samples."""

    def __init__(self, partition: str, found: c.Claimed) -> None:
        self.partition_id = partition
        self._tags = dict(zip(found.generations.tolist(), tags_of(found.tags, len(found.ids)), strict=True))

    def get_custom_meta(self, global_indices: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return the tags by sample index. Samples without tags have no entry."""
        return {index: self._tags[index] for index in global_indices if self._tags.get(index)}


def fetch(session_state: SessionState, asked: Asked, sampling: Sampling) -> Operation[BatchMeta]:
    """Claim a batch. With too few samples, return an empty meta when polling, else raise `FetchTimeoutError`."""
    try:
        return (yield from _fetch(session_state, asked, sampling))
    except ClaimTimeoutError as error:
        raise FetchTimeoutError(str(error)) from error


def _fetch(session_state: SessionState, asked: Asked, sampling: Sampling) -> Operation[BatchMeta]:
    """Select the implementation for the sampler: sequential, shared draws, or user-defined."""
    sampler = sampling.sampler
    if type(sampler) not in NAMED.values():
        return (yield from _claim_by_sampler(session_state, asked, sampling))
    if isinstance(sampler, SequentialSampler):
        claimed = yield from claim_in_order(session_state, asked, polling=sampling.polling, wait_s=sampling.wait_s)
        return BatchMeta.empty() if claimed is None else (yield from _meta(session_state, asked, claimed))
    assert isinstance(sampler, DrawingSampler)
    return (yield from _claim_by_draw(session_state, asked, sampling, sampler))


def claim_in_order(
    session_state: SessionState, asked: Asked, *, polling: bool, wait_s: float
) -> Operation[c.Claimed | None]:
    """Claim the oldest `batch_size` samples, all or none. With too few: None when polling, otherwise ClaimTimeoutError
    after `wait_s`."""
    if not polling:
        return (
            yield from _send_claim(session_state, asked, _claim(asked, batch_size=asked.batch_size, timeout_s=wait_s))
        )
    while True:
        look = _claim(asked, batch_size=asked.batch_size, blocking=False, peek=True)
        ready = yield from _send_claim(session_state, asked, look)
        if len(ready.ids) < asked.batch_size:
            return None
        claimed = yield from _claim_exactly(session_state, asked, ready, ready.generations.tolist())
        if claimed is not None:
            return claimed


def _claim_by_draw(
    session_state: SessionState, asked: Asked, sampling: Sampling, sampler: DrawingSampler
) -> Operation[BatchMeta]:
    """Return a share of a draw. With a `draw_key`, the draw is stored and shared: take the stored one, or make and
    store one. Without a key, each call makes its own."""
    with _sampler_errors(sampler):
        key, share = sampler.draw_key(asked.config), sampler.share_of(asked.config)
    wanted, end = sampler.wanted(asked.batch_size), time.monotonic() + sampling.wait_s
    while True:
        made = None if key is None else (yield from _stored_draw(session_state, asked, key))
        if made is None:
            ready = yield from _ready(
                session_state, asked, sampling, wanted, end, most=wanted if sampler.first_only else MAX_SAMPLES
            )
            with _sampler_errors(sampler):
                draw = sampler.draw(ready.generations.tolist(), asked.batch_size, _lengths(ready))
            if len(ready.ids) < wanted or draw is None:
                if sampling.polling:
                    return BatchMeta.empty()
                # Too few, or no draw possible from these: wait until more are ready.
                wanted = len(ready.ids) + 1
                continue
            claimed = yield from _claim_exactly(session_state, asked, ready, draw.samples)
            if claimed is None:
                continue  # another claim took one of them first
            if key is not None and not (yield from _store_draw(session_state, asked, key, claimed, draw)):
                continue  # another draw was stored first
            made = _StoredDraw.of(claimed, draw)
        return (yield from _meta_of(session_state, asked, made.share(share)))


def _claim_by_sampler(session_state: SessionState, asked: Asked, sampling: Sampling) -> Operation[BatchMeta]:
    """Claim the choice of a user-defined sampler, which may be a subclass of the samplers here."""
    sampler, wanted, end = sampling.sampler, asked.batch_size, time.monotonic() + sampling.wait_s
    while True:
        known = sampling.polling or sampler.has_cached_result(asked.partition, asked.task, asked.config)
        looking = replace(sampling, polling=known)
        ready = yield from _ready(session_state, asked, looking, wanted, end, most=MAX_SAMPLES)
        if len(ready.ids) < wanted and not sampler.has_cached_result(asked.partition, asked.task, asked.config):
            return BatchMeta.empty()
        indexes = ready.generations.tolist()
        view = PartitionView(asked.partition, ready)
        with _sampler_errors(sampler):
            given, consumed = sampler(list(indexes), asked.batch_size, partition=view, **asked.config)
        if len(given):
            new = set(indexes).intersection(consumed)
            if (
                yield from _claim_exactly(session_state, asked, ready, [index for index in consumed if index in new])
            ) is None:
                continue
            meta = BatchMeta(list(given), [asked.partition] * len(given))
            (_, names), *_ = yield from named(session_state, meta)
            return (yield from _meta_of(session_state, asked, samples_of(names)))
        if sampling.polling:
            return BatchMeta.empty()
        # The sampler chose none of these: wait until more are ready.
        wanted = len(indexes) + 1


@contextlib.contextmanager
def _sampler_errors(sampler: BaseSampler) -> Iterator[None]:
    """Convert a sampler's exception to `RefusedCallError`, as in the original, whose controller runs the sampler."""
    try:
        yield
    except Exception as error:
        raise RefusedCallError(f"{type(sampler).__name__}: {error}") from error


# --- requests to the service


def _claim(asked: Asked, **more: Any) -> c.Claim:
    return c.Claim(partition=asked.partition, task=asked.task, fields=asked.fields, **more)


def _send_claim(session_state: SessionState, asked: Asked, claim: c.Claim) -> Operation[c.Claimed]:
    """Send a claim and return its result. A missing partition or task is created."""
    try:
        return (yield Send(claim)).result  # type: ignore[no-any-return]
    except (PartitionNotFoundError, TaskNotFoundError):
        yield extend(session_state, asked.partition, tasks=(asked.task,))
        return (yield Send(claim)).result  # type: ignore[no-any-return]


def _ready(
    session_state: SessionState, asked: Asked, sampling: Sampling, wanted: int, end: float, *, most: int
) -> Operation[c.Claimed]:
    """Return the oldest `most` claimable samples once `wanted` are ready. When polling, return those ready now."""
    waits_s = max(end - time.monotonic(), 0.0)
    least = 1 if sampling.polling else wanted
    look = _claim(
        asked,
        batch_size=max(most, least),
        min_batch_size=least,
        blocking=not sampling.polling,
        timeout_s=waits_s,
        peek=True,
    )
    return (yield from _send_claim(session_state, asked, look))


def _claim_exactly(
    session_state: SessionState, asked: Asked, ready: c.Claimed, indexes: Sequence[int]
) -> Operation[c.Claimed | None]:
    """Claim exactly these of the ready samples. Return None if another claim took one of them first."""
    places = {generation: place for place, generation in enumerate(ready.generations.tolist())}
    chosen = [places[index] for index in indexes]
    samples = c.Samples(rows=ready.rows[chosen], generations=ready.generations[chosen])
    if not chosen:
        return msgspec.structs.replace(ready, ids=(), rows=samples.rows, generations=samples.generations, tags=())
    claim = _claim(asked, batch_size=len(chosen), blocking=False, samples=samples)
    claimed: c.Claimed = yield from _send_claim(session_state, asked, claim)
    return claimed if len(claimed.ids) else None


def _meta_of(session_state: SessionState, asked: Asked, samples: c.Samples) -> Operation[BatchMeta]:
    if not len(samples):
        return BatchMeta.empty()
    return (yield from _meta(session_state, asked, (yield from listed(session_state, asked.partition, samples))))


def _meta(session_state: SessionState, asked: Asked, found: c.Claimed | c.Listed) -> Operation[BatchMeta]:
    return (yield from batch_of(session_state, asked.partition, found, asked.fields, status=1))


def _lengths(ready: c.Claimed) -> Lengths:
    view = PartitionView("", ready)

    def lengths(indexes: Sequence[int]) -> list[int]:
        tags = view.get_custom_meta(indexes)
        return [int(tags.get(index, {}).get(LENGTH_TAG, 1)) for index in indexes]

    return lengths


# --- shared draws, stored in the service


@dataclass(frozen=True)
class _StoredDraw:
    """A draw whose samples are claimed."""

    rows: list[int]
    generations: list[int]
    shares: list[list[int]]

    @classmethod
    def of(cls, claimed: c.Claimed, draw: Draw) -> _StoredDraw:
        return cls(claimed.rows.tolist(), claimed.generations.tolist(), draw.shares)

    def share(self, number: int) -> c.Samples:
        places = self.shares[number] if 0 <= number < len(self.shares) else []
        rows, generations = np.array(self.rows, np.int64), np.array(self.generations, np.int64)
        return c.Samples(rows=rows[places], generations=generations[places])


def _draw_id(partition: str, task: str, key: str) -> str:
    return json.dumps([partition, task, key])


def _stored_draw(session_state: SessionState, asked: Asked, key: str) -> Operation[_StoredDraw | None]:
    """Return the draw that a process stored for this key, or None."""
    try:
        kept = yield from get.get(session_state, [_draw_id(asked.partition, asked.task, key)], ADAPTER, [DRAW], True)
    except NotFoundError:
        return None
    return _StoredDraw(**kept[DRAW][0])


def _store_draw(session_state: SessionState, asked: Asked, key: str, claimed: c.Claimed, draw: Draw) -> Operation[bool]:
    """Store the draw for the callers that share it. If another draw was stored first, release this claim and return
    False."""
    made = _StoredDraw.of(claimed, draw)
    try:
        kept = {DRAW: [vars(made)]}
        yield from put(session_state, [_draw_id(asked.partition, asked.task, key)], ADAPTER, kept, mode="create")
    except SampleExistsError:
        samples = c.Samples(rows=claimed.rows, generations=claimed.generations)
        claims = np.full(len(claimed.rows), claimed.claim, np.int64)
        yield Send(c.Nack(partition=asked.partition, task=asked.task, samples=samples, claims=claims))
        return False
    return True


def forget_draws(session_state: SessionState, partition: str) -> Operation[None]:
    """Delete the stored draws of a partition that is cleared."""
    try:
        kept = yield from listed(session_state, ADAPTER)
    except PartitionNotFoundError:
        return
    mine = [name for name in kept.ids if name.startswith("[") and json.loads(name)[0] == partition]
    if mine:
        yield Send(c.Clear(partition=ADAPTER, samples=c.Samples(ids=tuple(mine))))
