"""Errors of what was named and is not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataplane.errors.base import SHOWN, DataPlaneError, first_few


class NotFoundError(DataPlaneError, KeyError):
    """Something the call named does not exist (any more)."""

    grpc_status = "NOT_FOUND"


class PartitionNotFoundError(NotFoundError):
    def __init__(self, *, partition: str, known: Sequence[str] = ()) -> None:
        have = f"; registered are {first_few(sorted(known))}" if known else "; none is registered"
        super().__init__(
            f"unknown partition {partition!r}{have}. Call register_partition first.",
            partition=partition,
            known=list(known)[:SHOWN],
        )


class TaskNotFoundError(NotFoundError):
    def __init__(self, *, partition: str, task: str, known: Sequence[str] = ()) -> None:
        super().__init__(
            f"unknown task {task!r} in partition {partition!r}; "
            f"its consumer_tasks are {first_few(sorted(known)) or 'none'}",
            partition=partition,
            task=task,
            known=list(known)[:SHOWN],
        )


class FieldNotFoundError(NotFoundError):
    def __init__(self, *, partition: str, field: str, known: Sequence[str] = ()) -> None:
        super().__init__(
            f"unknown field {field!r} in partition {partition!r}; its fields are {first_few(sorted(known)) or 'none'}",
            partition=partition,
            field=field,
            known=list(known)[:SHOWN],
        )


class _SamplesError(NotFoundError):
    """Shared by the errors that name samples: `samples` holds the first few (all of them where a call was done for the
    others), `total` counts them all, `positions` are the places of `samples` in the call's list (the client turns
    handles into ids with them)."""

    what = ""

    def __init__(
        self,
        *,
        partition: str,
        samples: Sequence[str],
        total: int | None = None,
        positions: Sequence[int] = (),
        **more: Any,
    ) -> None:
        count = len(samples) if total is None else total
        super().__init__(
            self.describe(first_few(samples, count), partition=partition, **more),
            partition=partition,
            samples=list(samples),
            total=count,
            positions=[int(p) for p in positions],
            **more,
        )

    def describe(self, names: str, *, partition: str, **more: Any) -> str:
        raise NotImplementedError

    def with_ids(self, ids: Sequence[str]) -> _SamplesError:
        """The same error naming ids: `ids` is the call's own list, indexed by `positions`."""
        facts = dict(self.facts)
        if facts["positions"]:
            facts["samples"] = [ids[p] for p in facts["positions"]]
        return type(self)(**facts)


def _gone(*, evicted: int, lost: int, causes: Sequence[str], **_: Any) -> str:
    """What is known of how samples went."""
    told = [f"{evicted} of them evicted, as the partition was full"] if evicted else []
    if lost:
        told.append(f"{lost} of them lost {', '.join(causes) or 'with their storage unit'}")
    return f" ({'; '.join(told)})" if told else ""


class SampleNotFoundError(_SamplesError):
    """`partition` is "" where all were searched. `evicted` counts those that are known to have been evicted, to make
    space in a full partition, `lost` those whose storage unit is gone, or was damaged; `causes` says which, for the
    first few."""

    def __init__(self, *, evicted: int = 0, lost: int = 0, causes: Sequence[str] = (), **facts: Any) -> None:
        super().__init__(evicted=evicted, lost=lost, causes=list(causes)[:SHOWN], **facts)

    def describe(self, names: str, *, partition: str, **more: Any) -> str:
        where = f"partition {partition!r}" if partition else "any partition"
        return f"no live sample {names} in {where}: never put, or cleared since{_gone(**more)}"


class FieldNotProducedError(_SamplesError):
    def __init__(self, *, field: str, **facts: Any) -> None:
        super().__init__(field=field, **facts)

    def describe(self, names: str, *, partition: str, **more: Any) -> str:
        return f"field {more['field']!r} has not been produced for sample {names} of partition {partition!r}"


class StaleSampleError(_SamplesError):
    """`evicted`, `lost` and `causes` as in `SampleNotFoundError`. With `task`, the samples live, but the claim by that
    task does not hold them any more."""

    def __init__(
        self, *, task: str = "", evicted: int = 0, lost: int = 0, causes: Sequence[str] = (), **facts: Any
    ) -> None:
        super().__init__(task=task, evicted=evicted, lost=lost, causes=list(causes)[:SHOWN], **facts)

    def describe(self, names: str, *, partition: str, **more: Any) -> str:
        if more["task"]:
            return (
                f"sample {names} of partition {partition!r} is not held by the claim of this meta: its lease ended (or "
                f"it was acknowledged), and another claim of task {more['task']!r} may have it by now. It was left as "
                "it is; all other samples of the call were dealt with. Claim with a longer lease_s, or extend in time."
            )
        gone = _gone(**more)
        return (
            f"sample {names} of partition {partition!r} was cleared after this meta was made{gone} (the id may have "
            "been put again since: that is another sample). Nothing was read or written; take a fresh meta."
        )
