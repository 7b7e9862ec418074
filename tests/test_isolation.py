"""A test that says that it opens no sockets is held to it, and to nothing that others left behind."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from tests import conftest


@pytest.mark.skipif("COVERAGE_RUN" in os.environ, reason="without the audit hook, which `make coverage` leaves out")
@pytest.mark.parametrize("earlier", [False, True])
def test_only_what_a_test_does_itself_is_its_own(monkeypatch: pytest.MonkeyPatch, earlier: bool) -> None:
    raised: list[BaseException] = []

    def connect() -> None:
        with socket.socket() as peer:
            try:
                peer.connect(("127.0.0.1", 9))
            except BaseException as error:
                raised.append(error)

    thread = threading.Thread(target=connect)
    if earlier:
        monkeypatch.setattr(conftest._Test, "others", frozenset([thread]))
    thread.start()
    thread.join()
    with contextlib.suppress(IndexError):
        assert isinstance(raised[0], OSError if earlier else pytest.fail.Exception)
    assert raised or earlier
