"""User-defined selection strategies on top of `claim_meta`. The service's own strategies are in
`ledger.claims.samplers`."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from operator import index
from typing import Unpack

from dataplane.client.client import DataPlaneClient
from dataplane.client.operations.claim import ClaimOptions, convert_options
from dataplane.data.meta import KVBatchMeta
from dataplane.errors import InvalidRequestError


class ClientSampler(ABC):
    """Base class of selection strategies that run in the client. A subclass defines `select`.

    Each `claim` claims a pool of up to `pool_size` ready samples, keeps those that `select` returns, and releases
    the others. Other claims of the task cannot get samples of the pool in the meantime. If a strategy of the
    service is sufficient (`sampler` of `ClaimOptions`), `claim_meta` needs one round trip instead of two.

    options: see `ClaimOptions`. With `lease_s`, the pool of a process that ends during `claim` is released when its
    lease expires, and the caller must acknowledge the returned samples. Without it, they are consumed.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        *,
        pool_size: int,
        **options: Unpack[ClaimOptions],
    ) -> None:
        convert_options(ClaimOptions, options)  # only to raise its errors here
        if not isinstance(client, DataPlaneClient):
            raise TypeError(f"client: expected a DataPlaneClient, got {type(client).__name__}")
        if type(pool_size) is not int or pool_size < 1:
            raise InvalidRequestError(f"pool_size={pool_size!r}: expected an integer of at least 1")
        self._client = client
        self._partition = partition_id
        self._task = task_name
        self._fields = required_fields
        self._pool_size = pool_size
        self._options = options

    @abstractmethod
    def select(self, pool: KVBatchMeta, batch_size: int) -> Sequence[int]:
        """Return the rows of `pool` to keep, in the order for `claim`: distinct, at most `batch_size`.

        `pool` is not empty. It has the samples' tags, and their sequence lengths if they have the tag
        `input_lengths`; their fields can be read with `get_data`. If this method raises, the whole pool is released
        and `claim` raises the error.
        """

    def claim(self, batch_size: int, timeout_s: float | None = 60.0) -> KVBatchMeta:
        """Wait until `batch_size` samples are ready (or `min_batch_size`, if set in the options), and return those
        that `select` keeps. Return an empty meta if no samples are left to claim. Raise as `claim_meta`."""
        # The claim waits for `batch_size` samples (the options may set another number), and takes up to `pool_size` if
        # that many are ready.
        options: ClaimOptions = {"min_batch_size": batch_size, **self._options}
        pool = self._client.claim_meta(
            self._partition,
            self._task,
            self._fields,
            max(self._pool_size, batch_size),
            timeout_s=timeout_s,
            **options,
        )
        if not pool.size:
            return pool
        try:
            kept = self._validated(self.select(pool, batch_size), pool, batch_size)
        except BaseException:
            self._client.nack(pool)
            raise
        kept_rows = set(kept)  # the other rows are released
        self._client.nack(pool.subset([row for row in range(pool.size) if row not in kept_rows]))
        return pool.subset(kept)

    def _validated(self, selected: Sequence[int], pool: KVBatchMeta, batch_size: int) -> list[int]:
        """Return the result of `select` as a list of integers; a single integer counts as a list of one. Raise
        `InvalidRequestError` if it is invalid."""
        rows = list(selected) if isinstance(selected, Iterable) else [selected]
        # -1, which the check below rejects, stands for everything that is not an integer.
        try:
            kept = [-1 if isinstance(row, bool) else index(row) for row in rows]
        except TypeError:
            kept = [-1]
        if len(set(kept)) < len(kept) or len(kept) > batch_size or not set(kept) <= set(range(pool.size)):
            raise InvalidRequestError(
                f"{type(self).__name__}.select returned {reprlib.repr(rows)} for a pool of {pool.size}: expected at "
                f"most batch_size={batch_size} distinct integers in [0, {pool.size})"
            )
        return kept
