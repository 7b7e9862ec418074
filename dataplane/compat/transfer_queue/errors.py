"""Errors of the adapter. Each is also an instance of the classes that callers of the original package catch. All other
errors are those of `dataplane.errors`."""

from __future__ import annotations


class TransferQueueError(RuntimeError):
    """A rejected request. It is a RuntimeError, like the errors of the original's controller."""


class NotInitializedError(TransferQueueError, AssertionError):
    """The process uses no service yet: call `init()` first."""


class FetchTimeoutError(TransferQueueError, TimeoutError):
    """`get_meta` timed out with too few ready samples; it claimed none."""


class RefusedCallError(TransferQueueError, ValueError):
    """A call whose arguments the original's controller, or a sampler, rejects."""


class StorageKeyNotFoundError(TransferQueueError, KeyError, ValueError):
    """A call names a key, partition, sample or field that does not exist, or no longer exists. The original reports
    these as KeyError, ValueError or RuntimeError, depending on the component that detects it."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""
