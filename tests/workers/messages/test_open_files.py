"""Tensors that would travel by process groups, in processes that can open few more files or none."""

from __future__ import annotations

import os
import resource
from typing import Any

import pytest
import torch

from tests.alone import alone
from tests.workers.messages.messengers import Here, address, elsewhere
from workers.groups.worker import COLLECTIVES_VARIABLE

pytestmark = pytest.mark.integration

A, B = address(0), address(1)
BIG = 3 << 20


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
def test_no_message_is_lost_without_descriptors_for_a_process_group(limited: str, free: int) -> None:
    alone(_exchange_with_few_left, limited, free)


def _exchange_with_few_left(limited: str, free: int) -> None:
    os.environ[COLLECTIVES_VARIABLE] = "always"
    workers = Here(True, collectives="always")
    a = workers.worker(A)
    with elsewhere(workers.directory, B, _answer) as b:
        a.send("first contact", B)
        assert a.recv(B) == "first contact"
        b.pipe.send(None if limited == "sender" else free)
        assert b.hear() == "limited"
        if limited != "receiver":
            leave_free(free)
        for size in (3, BIG):
            sent = torch.full((size,), float(free))
            a.send(sent, B)
            assert torch.equal(a.recv(B), sent)
            target = torch.zeros(size)
            a.send_tensor(sent, B)
            a.recv_tensor(target, B)
            assert torch.equal(target, sent)
    workers.close()


def _answer(messenger: Any, pipe: Any) -> None:
    messenger.send(messenger.recv(A), A)
    free = pipe.recv()
    if free is not None:
        leave_free(free)
    pipe.send("limited")
    for size in (3, BIG):
        messenger.send(messenger.recv(A), A)
        target = torch.zeros(size)
        messenger.recv_tensor(target, A)
        messenger.send_tensor(target, A)
    pipe.poll(120)
