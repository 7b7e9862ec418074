"""Batches for tasks: the service says what is ready, a sampler chooses, and the service lets that very choice be
claimed, or not if somebody was faster; then it is made anew."""

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
from dataplane.compat.transfer_queue.operations import ADAPTER, EVERY, batch_of, extend, listed, named, put
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
"""The field of a draw that is kept."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a service samples. wait_s: how long `get_meta` waits for enough samples; polling: it does not, and returns
    an empty meta."""

    sampler: BaseSampler = field(default_factory=SequentialSampler)
    polling: bool = False
    wait_s: float = 5.0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a task asks for."""

    partition: str
    task: str
    fields: tuple[str, ...]
    batch_size: int
    config: Mapping[str, Any]


class PartitionView:
    """What a sampler sees of the partition: the tags of what is ready."""

    def __init__(self, partition: str, found: c.Claimed) -> None:
        self.partition_id = partition
        self._tags = dict(zip(found.generations.tolist(), tags_of(found.tags, len(found.ids)), strict=True))

    def get_custom_meta(self, global_indices: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The tags of those of the samples that have some."""
        return {index: self._tags[index] for index in global_indices if self._tags.get(index)}


def fetch(session_state: SessionState, asked: Asked, sampling: Sampling) -> Operation[BatchMeta]:
    """A batch, claimed. `FetchTimeoutError` where there are too few samples in time, or an empty meta in polling."""
    try:
        return (yield from _fetch(session_state, asked, sampling))
    except ClaimTimeoutError as error:
        raise FetchTimeoutError(str(error)) from error


def _fetch(session_state: SessionState, asked: Asked, sampling: Sampling) -> Operation[BatchMeta]:
    sampler = sampling.sampler
    if type(sampler) not in NAMED.values():
        return (yield from _sampled(session_state, asked, sampling))
    if isinstance(sampler, SequentialSampler):
        claimed = yield from claim_in_order(session_state, asked, polling=sampling.polling, wait_s=sampling.wait_s)
        return BatchMeta.empty() if claimed is None else (yield from _meta(session_state, asked, claimed))
    assert isinstance(sampler, DrawingSampler)
    return (yield from _drawn(session_state, asked, sampling, sampler))


def claim_in_order(
    session_state: SessionState, asked: Asked, *, polling: bool, wait_s: float
) -> Operation[c.Claimed | None]:
    """The oldest `batch_size` samples, all or none (in polling None; else ClaimTimeoutError after `wait_s`)."""
    if not polling:
        return (yield from _asked(session_state, asked, _claim(asked, batch_size=asked.batch_size, timeout_s=wait_s)))
    while True:
        look = _claim(asked, batch_size=asked.batch_size, blocking=False, peek=True)
        ready = yield from _asked(session_state, asked, look)
        if len(ready.ids) < asked.batch_size:
            return None
        claimed = yield from _claim_exactly(session_state, asked, ready, ready.generations.tolist())
        if claimed is not None:
            return claimed


def _drawn(
    session_state: SessionState, asked: Asked, sampling: Sampling, sampler: DrawingSampler
) -> Operation[BatchMeta]:
    """A share of a draw: of the one that was made, or of one made now."""
    with _choosing(sampler):
        key, share = sampler.draw_key(asked.config), sampler.share_of(asked.config)
    wanted, end = sampler.wanted(asked.batch_size), time.monotonic() + sampling.wait_s
    while True:
        made = None if key is None else (yield from _made_before(session_state, asked, key))
        if made is None:
            ready = yield from _ready(
                session_state, asked, sampling, wanted, end, most=wanted if sampler.first_only else EVERY
            )
            with _choosing(sampler):
                draw = sampler.draw(ready.generations.tolist(), asked.batch_size, _lengths(ready))
            if len(ready.ids) < wanted or draw is None:
                if sampling.polling:
                    return BatchMeta.empty()
                wanted = len(ready.ids) + 1
                continue
            claimed = yield from _claim_exactly(session_state, asked, ready, draw.samples)
            if claimed is None or not (key is None or (yield from _tell(session_state, asked, key, claimed, draw))):
                continue
            made = _Made.of(claimed, draw)
        return (yield from _meta_of(session_state, asked, made.share(share)))


def _sampled(session_state: SessionState, asked: Asked, sampling: Sampling) -> Operation[BatchMeta]:
    """What a sampler of the user's chooses, be it one that inherits from those here."""
    sampler, wanted, end = sampling.sampler, asked.batch_size, time.monotonic() + sampling.wait_s
    while True:
        known = sampling.polling or sampler.has_cached_result(asked.partition, asked.task, asked.config)
        looking = replace(sampling, polling=known)
        ready = yield from _ready(session_state, asked, looking, wanted, end, most=EVERY)
        if len(ready.ids) < wanted and not sampler.has_cached_result(asked.partition, asked.task, asked.config):
            return BatchMeta.empty()
        indexes = ready.generations.tolist()
        view = PartitionView(asked.partition, ready)
        with _choosing(sampler):
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
        wanted = len(indexes) + 1


@contextlib.contextmanager
def _choosing(sampler: BaseSampler) -> Iterator[None]:
    """What a sampler raises is what `get_meta` refuses, as where it runs in the original's controller."""
    try:
        yield
    except Exception as error:
        raise RefusedCallError(f"{type(sampler).__name__}: {error}") from error


# --- what the service is asked


def _claim(asked: Asked, **more: Any) -> c.Claim:
    return c.Claim(partition=asked.partition, task=asked.task, fields=asked.fields, **more)


def _asked(session_state: SessionState, asked: Asked, claim: c.Claim) -> Operation[c.Claimed]:
    """The answer to a claim, for which partition and task are made if they are not there."""
    try:
        return (yield Send(claim)).result  # type: ignore[no-any-return]
    except (PartitionNotFoundError, TaskNotFoundError):
        yield extend(session_state, asked.partition, tasks=(asked.task,))
        return (yield Send(claim)).result  # type: ignore[no-any-return]


def _ready(
    session_state: SessionState, asked: Asked, sampling: Sampling, wanted: int, end: float, *, most: int
) -> Operation[c.Claimed]:
    """The oldest `most` samples that the task may claim, when there are `wanted`; in polling what there is now."""
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
    return (yield from _asked(session_state, asked, look))


def _claim_exactly(
    session_state: SessionState, asked: Asked, ready: c.Claimed, indexes: Sequence[int]
) -> Operation[c.Claimed | None]:
    """The claim of exactly these of the samples that were ready; None where somebody was faster."""
    places = {generation: place for place, generation in enumerate(ready.generations.tolist())}
    chosen = [places[index] for index in indexes]
    samples = c.Samples(rows=ready.rows[chosen], generations=ready.generations[chosen])
    if not chosen:
        return msgspec.structs.replace(ready, ids=(), rows=samples.rows, generations=samples.generations, tags=())
    claim = _claim(asked, batch_size=len(chosen), blocking=False, samples=samples)
    claimed: c.Claimed = yield from _asked(session_state, asked, claim)
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


# --- draws that are shared, kept in the service


@dataclass(frozen=True)
class _Made:
    """A draw whose samples are claimed."""

    rows: list[int]
    generations: list[int]
    shares: list[list[int]]

    @classmethod
    def of(cls, claimed: c.Claimed, draw: Draw) -> _Made:
        return cls(claimed.rows.tolist(), claimed.generations.tolist(), draw.shares)

    def share(self, number: int) -> c.Samples:
        places = self.shares[number] if 0 <= number < len(self.shares) else []
        rows, generations = np.array(self.rows, np.int64), np.array(self.generations, np.int64)
        return c.Samples(rows=rows[places], generations=generations[places])


def _draw_id(partition: str, task: str, key: str) -> str:
    return json.dumps([partition, task, key])


def _made_before(session_state: SessionState, asked: Asked, key: str) -> Operation[_Made | None]:
    """The draw that somebody made for this key."""
    try:
        kept = yield from get.get(session_state, [_draw_id(asked.partition, asked.task, key)], ADAPTER, [DRAW], True)
    except NotFoundError:
        return None
    return _Made(**kept[DRAW][0])


def _tell(session_state: SessionState, asked: Asked, key: str, claimed: c.Claimed, draw: Draw) -> Operation[bool]:
    """Keep the draw for whoever shares it. False where another was kept meanwhile: then this one is given back."""
    made = _Made.of(claimed, draw)
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
    """The draws of a partition that is cleared are of no use any more."""
    try:
        kept = yield from listed(session_state, ADAPTER)
    except PartitionNotFoundError:
        return
    mine = [name for name in kept.ids if name.startswith("[") and json.loads(name)[0] == partition]
    if mine:
        yield Send(c.Clear(partition=ADAPTER, samples=c.Samples(ids=tuple(mine))))
