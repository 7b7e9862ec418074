"""Errors of the adapter. Each is also what callers of the original package catch; everything else is raised as
`dataplane.errors` has it."""

from __future__ import annotations


class TransferQueueError(RuntimeError):
    """The original reports what its controller refuses as a RuntimeError; so is this."""


class NotInitializedError(TransferQueueError, AssertionError):
    """There is no service to use yet: call `init()` first."""


class FetchTimeoutError(TransferQueueError, TimeoutError):
    """`get_meta` found too few samples in time, and claimed none."""


class RefusedCallError(TransferQueueError, ValueError):
    """A call that the controller of the original refuses, for its arguments or for what a sampler says of them."""


class StorageKeyNotFoundError(TransferQueueError, KeyError, ValueError):
    """A call names something that is not there (any more): a key, a partition, a sample, or a field of one. The
    original reports these as KeyError, ValueError or RuntimeError, depending on who noticed."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""
