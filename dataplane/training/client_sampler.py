"""Selection strategies of a program's own, over `claim_meta`. Those of the service are in `ledger.claims.samplers`."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from operator import index
from typing import Unpack

from dataplane.client.client import DataPlaneClient
from dataplane.client.operations.claim import ClaimOptions, checked
from dataplane.data.meta import KVBatchMeta
from dataplane.errors import InvalidRequestError


class ClientSampler(ABC):
    """Base class of selection strategies that run in the client: a subclass defines `select`.

    Each `claim` claims a pool of up to `pool_size` ready samples, keeps those that `select` returns, and gives the
    others back. Other claims of the task do not get the pool until then. Where the strategies of the service do
    (`sampler` of `ClaimOptions`), `claim_meta` takes one round trip instead of two.

    options: see `ClaimOptions`. With `lease_s`, the pool of a process that ends within `claim` comes back when its
    lease is over, and the samples returned are to be acknowledged; without, they are consumed.
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
        checked(ClaimOptions, options)
        if not isinstance(client, DataPlaneClient):
            raise TypeError(f"client is {type(client).__name__}: a ClientSampler takes a DataPlaneClient")
        if type(pool_size) is not int or pool_size < 1:
            raise InvalidRequestError(f"pool_size={pool_size!r}: expected a whole number of samples, at least 1")
        self._client = client
        self._partition = partition_id
        self._task = task_name
        self._fields = required_fields
        self._pool_size = pool_size
        self._options = options

    @abstractmethod
    def select(self, pool: KVBatchMeta, batch_size: int) -> Sequence[int]:
        """The rows of `pool` to keep, in the order in which `claim` returns them: distinct, `batch_size` at most.

        `pool` is not empty and has the samples' tags, and their sequence lengths where they have the tag
        `input_lengths`; their fields can be read with `get_data`. What this raises, `claim` raises, and the whole pool
        goes back.
        """

    def claim(self, batch_size: int, timeout_s: float = 60.0) -> KVBatchMeta:
        """Wait until `batch_size` samples are ready (or `min_batch_size`, where that is among the options), and return
        those that `select` keeps of the pool. Empty where nothing is left to claim; raises as `claim_meta` does."""
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
            kept = self._checked(self.select(pool, batch_size), pool, batch_size)
        except BaseException:
            self._client.nack(pool)
            raise
        chosen = set(kept)
        self._client.nack(pool.subset([row for row in range(pool.size) if row not in chosen]))
        return pool.subset(kept)

    def _checked(self, selected: Sequence[int], pool: KVBatchMeta, batch_size: int) -> list[int]:
        rows = list(selected) if isinstance(selected, Iterable) else [selected]
        try:
            kept = [-1 if isinstance(row, bool) else index(row) for row in rows]
        except TypeError:
            kept = [-1]
        if len(set(kept)) < len(kept) or len(kept) > batch_size or not set(kept) <= set(range(pool.size)):
            raise InvalidRequestError(
                f"{type(self).__name__}.select returned {reprlib.repr(rows)} of a pool of {pool.size}: expected at "
                f"most batch_size={batch_size} different whole numbers in [0, {pool.size})"
            )
        return kept
