"""Tensors that would travel by process groups, in processes that can open few more files or none."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.alone import alone
from tests.workers.messages.messengers import Here, address, elsewhere, reported_to_sender
from workers.errors import DeviceTransferError
from workers.messages.collectives import COLLECTIVES_VARIABLE

pytestmark = pytest.mark.integration

A, B = address(0), address(1)
BIG = 3 << 20
NO_FILES = "OpenFilesError|Too many open files"


def leave_free(count: int) -> None:
    """Let this process open only so many more files, for the rest of its time."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}"))
    while (fd := os.open(os.devnull, os.O_RDONLY)) < highest:  # the limit is that of the numbers: leave no gap
        pass
    os.close(fd)
    limit = highest + 1 + count
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@pytest.mark.parametrize(
    ("limited", "free"),
    [("sender", 0), ("sender", 1), ("sender", 24), ("receiver", 0), ("receiver", 24), ("both", 8)],
)
def test_a_message_without_descriptors_for_a_process_group_is_an_error_at_both_ends(limited: str, free: int) -> None:
    alone(_exchange_with_few_left, limited, free)


def _exchange_with_few_left(limited: str, free: int) -> None:
    os.environ[COLLECTIVES_VARIABLE] = "always"
    workers = Here(True, collectives="always")
    a = workers.worker(A)
    with elsewhere(workers.directory, B, _answer) as b:
        a.send("first contact", B)
        assert a.recv(B) == "first contact"
        b.pipe.send((free, None if limited == "sender" else free))
        assert b.hear() == "limited"
        if limited != "receiver":
            leave_free(free)
        for size in (3, BIG):
            sent = torch.full((size,), float(free))
            work = a.send(sent, B, async_op=True)
            if b.hear() == "failed":
                with pytest.raises(DeviceTransferError, match=NO_FILES):
                    reported_to_sender(work, a, B)
            with _if_any(DeviceTransferError, match=NO_FILES):
                assert torch.equal(a.recv(B), sent)
        a.send("fine", B, async_op=True)
        assert b.hear() == "fine"
    workers.close()


@contextlib.contextmanager
def _if_any(error: type[Exception], match: str) -> Iterator[None]:
    try:
        yield
    except error as raised:
        if re.search(match, str(raised)) is None:
            raise


def _answer(messenger: Any, pipe: Any) -> None:
    messenger.send(messenger.recv(A), A)
    expected, free = pipe.recv()
    if free is not None:
        leave_free(free)
    pipe.send("limited")
    for size in (3, BIG):
        try:
            messenger.recv(A)
            pipe.send("received")
        except DeviceTransferError:
            pipe.send("failed")
        sent = torch.full((size,), float(expected))
        try:
            messenger.send(sent, A, async_op=True)
        except DeviceTransferError:  # of the last message, which the receiver could not receive
            messenger.send(sent, A, async_op=True)
    pipe.send(messenger.recv(A))
    pipe.poll(120)
