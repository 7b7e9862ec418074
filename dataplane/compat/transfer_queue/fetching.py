"""Claim batches for tasks. The service lists the ready samples, a sampler chooses among them, and
the service claims exactly that choice. If another process claimed one of these samples first, the
choice is repeated."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

import msgspec
import numpy as np

from dataplane.client.operations import get
from dataplane.client.operations.sample_names import samples_of
from dataplane.client.operations.steps import Operation, Send
from dataplane.client.session_state import SessionState
from dataplane.compat.transfer_queue.columns import tags_of
from dataplane.compat.transfer_queue.errors import FetchTimeoutError, RefusedCallError
from dataplane.compat.transfer_queue.metadata import BatchMeta
from dataplane.compat.transfer_queue.operations import (
    ADAPTER,
    MAX_SAMPLES,
    build_batch_meta,
    extend_partition,
    list_samples,
    put,
    resolve_samples,
)
from dataplane.compat.transfer_queue.sampler import (
    NAMED,
    BaseSampler,
    DrawingSampler,
    SequentialSampler,
    share,
)
from dataplane.compat.transfer_queue.settings import Sampling
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
class BatchRequest:
    """The request of a task for a batch of `batch_size` samples that have all `fields`. config: the
    caller's `sampling_config`, which the sampler reads."""

    partition: str
    task: str
    fields: tuple[str, ...]
    batch_size: int
    config: Mapping[str, Any]


class PartitionView:
    """A sampler's view of the partition: the tags of the ready samples, by global index (the
    sample's generation)."""

    def __init__(self, partition: str, ready: c.Claimed) -> None:
        self.partition_id = partition
        self._tags = dict(zip(ready.generations.tolist(), tags_of(ready.tags, len(ready.ids)), strict=True))

    def get_custom_meta(self, global_indices: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return the tags by global index. Samples without tags have no entry."""
        return {index: self._tags[index] for index in global_indices if self._tags.get(index)}


def fetch(session_state: SessionState, request: BatchRequest, sampling: Sampling) -> Operation[BatchMeta]:
    """Claim a batch in the way that the sampler needs: in order, by a shared draw, or by a
    user-defined sampler. With too few samples, return an empty meta when polling, else raise
    `FetchTimeoutError`."""
    sampler = sampling.sampler
    polling = sampling.polling
    try:
        # The exact classes only: a subclass can override any method, so it is called as a
        # user-defined sampler.
        if type(sampler) not in NAMED.values():
            return (yield from _claim_by_sampler(session_state, request, sampling))
        if not isinstance(sampler, SequentialSampler):
            assert isinstance(sampler, DrawingSampler)
            return (yield from _claim_by_draw(session_state, request, sampling, sampler))
        claimed = yield from claim_in_order(session_state, request, polling=polling, wait_s=sampling.wait_s)
    except ClaimTimeoutError as error:
        raise FetchTimeoutError(str(error)) from error
    if claimed is None:
        return BatchMeta.empty()
    return (yield from _build_meta(session_state, request, claimed))


def claim_in_order(
    session_state: SessionState, request: BatchRequest, *, polling: bool, wait_s: float
) -> Operation[c.Claimed | None]:
    """Claim the oldest `batch_size` samples. With too few, claim none: return None when polling,
    otherwise ClaimTimeoutError after `wait_s`. (If a native client has completed the partition, a
    claim that waits takes the samples that are left, even if they are fewer.)"""
    if not polling:
        claim = _claim_command(request, batch_size=request.batch_size, timeout_s=wait_s)
        return (yield from _send_claim(session_state, request, claim))
    # A claim that does not block takes whatever is ready, even too few samples. So look first,
    # without a claim (peek).
    while True:  # again if another claim takes one of the samples first
        peek = _claim_command(request, batch_size=request.batch_size, blocking=False, peek=True)
        ready = yield from _send_claim(session_state, request, peek)
        if len(ready.ids) < request.batch_size:
            return None
        claimed = yield from _claim_exactly(session_state, request, ready, ready.generations.tolist())
        if claimed is not None:
            return claimed


def _claim_by_draw(
    session_state: SessionState, request: BatchRequest, sampling: Sampling, sampler: DrawingSampler
) -> Operation[BatchMeta]:
    """Return the meta of the caller's share of a draw. With a `draw_key`, the draw is shared: take
    the stored one, or make and store one. Without a key, each call makes its own. With too few
    samples, return an empty meta when polling, otherwise ClaimTimeoutError."""
    with _sampler_errors(sampler):
        key = sampler.draw_key(request.config)
        share_number = sampler.share_of(request.config)
    # `needed`: the number of ready samples with which the next attempt can succeed; it grows after
    # a failed draw.
    needed = sampler.wanted(request.batch_size)
    deadline = time.monotonic() + sampling.wait_s
    while True:
        stored = None if key is None else (yield from _load_draw(session_state, request, key))
        if stored is not None:
            samples = _samples_of(share(stored, share_number))
            return (yield from _meta_of(session_state, request, samples))
        limit = needed if sampler.first_only else MAX_SAMPLES
        ready = yield from _list_ready(session_state, request, sampling, needed, deadline, limit=limit)
        with _sampler_errors(sampler):  # also with too few samples: `draw` raises for wrong arguments
            view = PartitionView(request.partition, ready)
            draw = sampler.draw(ready.generations.tolist(), request.batch_size, view)
        if len(ready.ids) < needed or draw is None:
            if sampling.polling:
                return BatchMeta.empty()
            # Too few, or no draw possible from these: wait until more are ready.
            needed = len(ready.ids) + 1
            continue
        indexes = [index for each in draw for index in each]
        claimed = yield from _claim_exactly(session_state, request, ready, indexes)
        if claimed is None:
            continue  # another claim took one of them first
        handles = iter(np.stack([claimed.rows, claimed.generations], axis=1).tolist())
        own_draw = [list(islice(handles, len(each))) for each in draw]
        if key is None or (yield from _store_draw(session_state, request, key, claimed, own_draw)):
            samples = _samples_of(share(own_draw, share_number))
            return (yield from _meta_of(session_state, request, samples))
        # Another draw was stored first.


def _claim_by_sampler(session_state: SessionState, request: BatchRequest, sampling: Sampling) -> Operation[BatchMeta]:
    """Claim the samples that a user-defined sampler chooses. With too few samples, return an empty
    meta when polling, otherwise ClaimTimeoutError."""
    sampler = sampling.sampler
    needed = request.batch_size
    deadline = time.monotonic() + sampling.wait_s
    while True:
        # A sampler with a cached result returns it whatever is ready: list without waiting.
        at_once = sampling.polling or sampler.has_cached_result(request.partition, request.task, request.config)
        listing = replace(sampling, polling=at_once)
        ready = yield from _list_ready(session_state, request, listing, needed, deadline, limit=MAX_SAMPLES)
        if len(ready.ids) < needed and not sampler.has_cached_result(request.partition, request.task, request.config):
            return BatchMeta.empty()  # only when polling: otherwise `_list_ready` has waited for `needed`
        indexes = ready.generations.tolist()
        view = PartitionView(request.partition, ready)  # for the sampler to read tags
        with _sampler_errors(sampler):
            # given: the samples of the caller; consumed: the samples to claim. See
            # `BaseSampler.sample`.
            given, consumed = sampler(list(indexes), request.batch_size, partition=view, **request.config)
        if len(given):
            # Samples of a cached result were claimed by the call that cached it. Claim those that
            # are still ready.
            unclaimed = set(indexes).intersection(consumed)
            to_claim = [index for index in consumed if index in unclaimed]
            claimed = yield from _claim_exactly(session_state, request, ready, to_claim)
            if claimed is None:
                continue  # another claim took one of them first
            meta = BatchMeta(list(given), [request.partition] * len(given))
            [(_, native_meta)] = yield from resolve_samples(session_state, meta)  # one pair per partition
            found = samples_of(native_meta, request.partition)
            return (yield from _meta_of(session_state, request, found))
        if sampling.polling:
            return BatchMeta.empty()
        # The sampler chose none of these: wait until more are ready.
        needed = len(indexes) + 1


@contextlib.contextmanager
def _sampler_errors(sampler: BaseSampler) -> Iterator[None]:
    """Convert a sampler's exception to `RefusedCallError`, as in the original, whose controller
    runs the sampler."""
    try:
        yield
    except Exception as error:
        raise RefusedCallError(f"{type(sampler).__name__}: {error}") from error


# --- requests to the service


def _claim_command(request: BatchRequest, **options: Any) -> c.Claim:
    return c.Claim(partition=request.partition, task=request.task, fields=request.fields, **options)


def _send_claim(session_state: SessionState, request: BatchRequest, claim: c.Claim) -> Operation[c.Claimed]:
    """Send a claim and return its result. A missing task is created. A missing partition has no
    ready samples; only a claim that waits creates it, because the service waits per partition."""
    try:
        return (yield Send(claim)).result  # type: ignore[no-any-return]
    except (PartitionNotFoundError, TaskNotFoundError) as error:
        if isinstance(error, PartitionNotFoundError) and not claim.blocking:
            none = np.zeros(0, np.int64)
            return c.Claimed(ids=(), rows=none, generations=none, fields=(), tags=())
        yield extend_partition(session_state, request.partition, tasks=(request.task,))
        return (yield Send(claim)).result  # type: ignore[no-any-return]


def _list_ready(
    session_state: SessionState, request: BatchRequest, sampling: Sampling, needed: int, deadline: float, *, limit: int
) -> Operation[c.Claimed]:
    """Return up to `limit` of the oldest claimable samples, without a claim, as soon as `needed`
    are ready. When polling, return those that are ready now. deadline: of `time.monotonic`;
    afterwards ClaimTimeoutError."""
    minimum = 1 if sampling.polling else needed
    peek = _claim_command(
        request,
        batch_size=max(limit, minimum),  # `needed` above MAX_SAMPLES: the service raises `LimitError`
        min_batch_size=minimum,
        blocking=not sampling.polling,
        timeout_s=max(deadline - time.monotonic(), 0.0),
        peek=True,
    )
    return (yield from _send_claim(session_state, request, peek))


def _claim_exactly(
    session_state: SessionState, request: BatchRequest, ready: c.Claimed, indexes: Sequence[int]
) -> Operation[c.Claimed | None]:
    """Claim exactly the ready samples with these global indexes. If another claim took one of them,
    claim none and return None."""
    # A sample's global index is its generation.
    positions = {generation: position for position, generation in enumerate(ready.generations.tolist())}
    chosen = [positions[index] for index in indexes]
    samples = c.Samples(rows=ready.rows[chosen], generations=ready.generations[chosen])
    if not chosen:  # the result of a claim without samples
        return msgspec.structs.replace(ready, ids=(), rows=samples.rows, generations=samples.generations, tags=())
    claim = _claim_command(request, batch_size=len(chosen), blocking=False, samples=samples)
    claimed: c.Claimed = yield from _send_claim(session_state, request, claim)
    return claimed if len(claimed.ids) else None


def _meta_of(session_state: SessionState, request: BatchRequest, samples: c.Samples) -> Operation[BatchMeta]:
    """Return the meta of claimed samples with the requested fields."""
    if not len(samples):
        return BatchMeta.empty()
    listing = yield from list_samples(session_state, request.partition, samples)
    return (yield from _build_meta(session_state, request, listing))


def _build_meta(
    session_state: SessionState, request: BatchRequest, samples: c.Claimed | c.Listed
) -> Operation[BatchMeta]:
    return (yield from build_batch_meta(session_state, request.partition, samples, request.fields, status=1))


# --- shared draws, stored in the service


StoredDraw: TypeAlias = list[list[list[int]]]
"""A draw whose samples are claimed: for each share, the row and the generation of its samples."""


def _samples_of(handles: Sequence[Any]) -> c.Samples:
    """Return the samples of one share of a stored draw."""
    pairs = np.array(handles, np.int64).reshape(-1, 2)
    return c.Samples(rows=pairs[:, 0].copy(), generations=pairs[:, 1].copy())


def _draw_id(partition: str, task: str, key: str) -> str:
    return json.dumps([partition, task, key])


def _load_draw(session_state: SessionState, request: BatchRequest, key: str) -> Operation[StoredDraw | None]:
    """Return the draw that a process stored for this key, or None."""
    draw_id = _draw_id(request.partition, request.task, key)
    try:
        values = yield from get.get(session_state, [draw_id], ADAPTER, [DRAW], copy=True)
    except NotFoundError:
        return None
    return values[DRAW][0]  # type: ignore[no-any-return]


def _store_draw(
    session_state: SessionState, request: BatchRequest, key: str, claimed: c.Claimed, draw: StoredDraw
) -> Operation[bool]:
    """Store the draw for the callers that share it. If another draw was stored first, release this
    claim and return False."""
    draw_id = _draw_id(request.partition, request.task, key)
    try:
        yield from put(session_state, [draw_id], ADAPTER, {DRAW: [draw]}, mode="create")
    except SampleExistsError:
        # Nack: the samples can be claimed again.
        samples = c.Samples(rows=claimed.rows, generations=claimed.generations)
        claims = np.full(len(claimed.rows), claimed.claim, np.int64)
        yield Send(c.Nack(partition=request.partition, task=request.task, samples=samples, claims=claims))
        return False
    return True


def forget_draws(session_state: SessionState, partition: str) -> Operation[None]:
    """Delete the stored draws of a partition whose samples were cleared or replaced."""
    try:
        stored = yield from list_samples(session_state, ADAPTER)
    except PartitionNotFoundError:
        return
    # The id of a draw is a JSON list (`_draw_id`). The other samples of the adapter have plain text
    # as id.
    draw_ids = [name for name in stored.ids if name.startswith("[") and json.loads(name)[0] == partition]
    if draw_ids:
        yield Send(c.Clear(partition=ADAPTER, samples=c.Samples(ids=tuple(draw_ids))))
