"""Errors to gRPC statuses and back."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from dataplane import errors as e
from dataplane.protocol.grpc_status import DETAILS_KEY, from_status, to_status


class Ended(grpc.RpcError, grpc.Call):
    """What a failed gRPC call raises."""

    def __init__(self, code: grpc.StatusCode, text: str, metadata: tuple[tuple[str, bytes], ...] = ()) -> None:
        self._of_call = (code, text, metadata)

    def code(self) -> grpc.StatusCode:
        return self._of_call[0]

    def details(self) -> str:
        return self._of_call[1]

    def trailing_metadata(self) -> Any:
        return self._of_call[2]

    def initial_metadata(self) -> Any:
        return ()

    def add_callback(self, callback: Any) -> bool:
        return False

    def cancel(self) -> bool:
        return False

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0


def back(error: grpc.RpcError) -> e.DataPlaneError:
    return from_status(error, address="here:1", what="Claim", waited_s=1.5)


def test_every_error_has_a_status() -> None:
    statuses = {grpc.StatusCode[kind.grpc_status] for kind in e.ERROR_TYPES.values()}
    assert grpc.StatusCode.OK not in statuses
    assert grpc.StatusCode.UNKNOWN not in statuses


def test_an_error_comes_back_with_its_facts() -> None:
    error = e.SchemaError(partition="p", field="f", got="int64", expected="float32")
    code, text, metadata = to_status(error)
    assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, str(error))
    again = back(Ended(code, text, metadata))
    assert type(again) is e.SchemaError
    assert again.facts == error.facts


def test_an_error_too_large_for_a_trailer_keeps_its_status_and_the_start_of_its_text() -> None:
    code, text, metadata = to_status(e.InvalidRequestError("x" * 100_000))
    assert metadata == ()
    assert len(text) == 1024
    again = back(Ended(code, text))
    assert isinstance(again, e.InvalidRequestError)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.UNAVAILABLE, e.ServiceUnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, e.CallTimeoutError),
        (grpc.StatusCode.UNAUTHENTICATED, e.AuthenticationError),
        (grpc.StatusCode.INVALID_ARGUMENT, e.InvalidRequestError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, e.ServiceUnavailableError),
        (grpc.StatusCode.DATA_LOSS, e.InternalError),
    ],
    ids=lambda each: getattr(each, "name", getattr(each, "__name__", "")),
)
def test_statuses_that_grpc_made_itself_become_the_nearest_of_ours(
    code: grpc.StatusCode, error: type[e.DataPlaneError]
) -> None:
    assert type(back(Ended(code, "why"))) is error
    assert type(back(Ended(code, "why", ((DETAILS_KEY, b"\xff\xff"),)))) is error
