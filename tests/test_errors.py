"""Every error says what it must, and survives pickling and the wire with its facts."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from dataplane import errors as e

EXAMPLES: list[e.DataPlaneError] = [
    e.PartitionNotFoundError(partition="p", known=list("gfedcba")),
    e.TaskNotFoundError(partition="p", task="t", known=["u"]),
    e.TaskNotFoundError(partition="p", task="t", known=list("bacdef")),
    e.FieldNotFoundError(partition="p", field="f"),
    e.FieldNotFoundError(partition="p", field="f", known=list("bacdef")),
    e.SampleNotFoundError(partition="p", samples=["a", "b"], total=9, positions=[0, 3]),
    e.FieldNotProducedError(field="f", partition="p", samples=["a"]),
    e.StaleSampleError(partition="p", samples=["row 3"], positions=[1]),
    e.SampleExistsError(partition="p", samples=["a"]),
    e.PartitionExistsError(partition="p"),
    e.CheckpointError(file="/c/manifest.json", why="truncated"),
    e.SchemaError(partition="p", field="f", got="dense", expected="jagged"),
    e.StaleSchemaError(partition="p", field="f"),
    e.InvalidRequestError("no"),
    e.RowsChangedError(partition="p", field="f", samples=["a"], total=2),
    e.ShareConflictError(partition="p", task="t", step=3, rank=1, samples=["a", "b"], total=4),
    e.PartitionSealedError(partition="p", samples=["a"]),
    e.PartitionDroppedError(partition="p", waiting="a claim"),
    e.RequestTooLargeError(wanted_bytes=2, limit_bytes=1, what="a put"),
    e.StaleCallError(session=1, call_id=2, watermark=3),
    e.ClientClosedError(),
    e.RolloutAbortedError(samples=["a"], why="too old"),
    e.UnsupportedValueError(field="f", row=3, got="set", hint="Use a list."),
    e.CapacityTimeoutError(wanted_bytes=9, free_bytes=1, waited_s=2.0, holders=[("partition 'p'", 7)]),
    e.ClaimTimeoutError(
        partition="p",
        task="t",
        wanted=4,
        ready=1,
        waited_s=2.0,
        why="f was never produced",
        lacking={"f": 3},
        undeclared=("f",),
        expected=None,
        writers=[{"session": 3, "name": "rollout", "ago_s": 2.5, "live": True, "fields": ["g"]}],
    ),
    e.CallTimeoutError(what="Commit", waited_s=1.0, peer="tcp://x"),
    e.ServiceUnavailableError(address="x:1", why="refused"),
    e.AuthenticationError(peer="x:1", why="no token"),
    e.LimitError(what="samples in one command", got=9, limit=8, hint="Send several."),
    e.ProtocolVersionError(client_version=1, service_version=2),
    e.SessionExpiredError(session=4, why="silent for 20 s"),
    e.SessionInterruptedError(),
    e.ReentrantCallError(),
    e.ServiceRestartedError(expected_epoch=1, got_epoch=2, what="unit 3"),
    e.StorageUnitError(unit=1, endpoint="tcp://x", why="gone"),
    e.CallCancelledError(session=1, call_id=2),
    e.PortTakenError(address="127.0.0.1:7040", holder="process 7 (python3)"),
    e.ArenaSpaceError(directory="/dev/shm", found_bytes=1, wanted_bytes=2),
    e.ChecksumError(partition="p", sample="a", field="x", unit=2, expected=1, got=(1 << 32) - 1, total=3),
    e.DrainError(
        unit=3, cells=7, live={"p": 900}, reserved_bytes=64, holders=["session 4 (a, live)"], why="It was late"
    ),
    e.StateDirError(directory="/state", why="another process uses it", hint="Stop that one first"),
    e.CheckpointWriteError(file="/c/a", why="No space left on device"),
    e.InternalError(what="a defect"),
]


def plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts with tuples as lists, as the wire brings them."""
    return {
        name: [list(f) if isinstance(f, tuple) else f for f in fact] if isinstance(fact, list) else fact
        for name, fact in facts.items()
    }


def same(left: e.DataPlaneError, right: e.DataPlaneError) -> bool:
    return type(left) is type(right) and str(left) == str(right) and plain(left.facts) == plain(right.facts)


def test_there_is_an_example_of_every_error() -> None:
    assert {type(example).__name__ for example in EXAMPLES} == set(e.ERROR_TYPES)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_pickle_and_wire(error: e.DataPlaneError) -> None:
    assert same(pickle.loads(pickle.dumps(error)), error)
    assert same(e.from_wire(*e.to_wire(error)), error)
    assert all(getattr(error, name) == fact for name, fact in error.facts.items())


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_derives_from_a_builtin_and_is_in_the_drawing(error: e.DataPlaneError) -> None:
    builtins = (KeyError, ValueError, TypeError, TimeoutError, ConnectionError, OSError, RuntimeError)
    assert isinstance(error, builtins)
    assert type(error).__name__ in (e.__doc__ or "")


def test_messages_are_short_whatever_the_count() -> None:
    many = [f"sample-{n}" for n in range(100_000)]
    error = e.SampleNotFoundError(partition="p", samples=many)
    assert "99995 more" in str(error)
    assert len(str(error)) < 300
    assert error.total == 100_000


def test_positions_become_ids() -> None:
    error = e.StaleSampleError(partition="p", samples=["row 3"], positions=[1]).with_ids(["a", "b"])
    assert "'b'" in str(error)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (e.AuthenticationError(peer="x:1", why="no token"), "x:1 rejected this client: no token. Pass the service's"),
        (e.AuthenticationError(peer="x:1", why="a token", hint="Unset it."), "this client: a token. Unset it."),
        (e.StorageUnitError(unit=1, endpoint="tcp://x", why="gone"), "storage unit 1 at tcp://x: gone"),
        (e.StorageUnitError(unit=1, endpoint="", why="gone"), "storage unit 1: gone"),
        (e.StorageUnitError(unit=1, endpoint="?", why="gone"), "storage unit 1: gone"),
        (
            e.ServiceRestartedError(expected_epoch=1, got_epoch=2, what="unit 3"),
            "restarted. Repeat the call; if it fails again, connect a new client and put lost samples again.",
        ),
        (
            e.ServiceRestartedError(expected_epoch=2, got_epoch=0, what="some space"),
            "some space is lost: the process was restarted. Repeat the call; if it fails again, connect a new client",
        ),
        (
            e.ServiceRestartedError(expected_epoch=1, got_epoch=2, what="the service", lost="all"),
            "lost: all. Connect a new client and put lost samples again.",
        ),
    ],
)
def test_the_remedy_fits_the_cause(error: e.DataPlaneError, says: str) -> None:
    assert says in str(error)
    assert says in str(e.from_wire(*e.to_wire(error)))


def test_an_error_of_a_newer_service_is_still_an_error() -> None:
    assert "FutureError" in str(e.from_wire("FutureError", b"\x80"))


@pytest.mark.parametrize("facts", [b"", b"\xc1", b"\x80", b"\x07", b"\x81\xa4what\x01\x02", b"\x81\xa5peers\xa1x"])
def test_facts_that_make_no_such_error_are_an_internal_error(facts: bytes) -> None:
    error = e.from_wire("AuthenticationError", facts)
    assert isinstance(error, e.InternalError)
    assert "AuthenticationError" in str(error)


@pytest.mark.parametrize("field", ["x", "a b", "value", "tags", "sample_ids"])
def test_an_unsupported_value_of_a_field_is_described_as_such(field: str) -> None:
    error = e.UnsupportedValueError(field=field, row=3, got="int", hint="")
    assert str(error).startswith(f"field {field!r}, row 3: int")
    for other in ("argument tags", "tag lang", "a stored value"):
        assert str(e.UnsupportedValueError(field=other, row=None, got="int", hint="")).startswith(f"{other}: int")
