"""Worker classes for tests of worker groups."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import torch

from workers import Worker, WorkerAddress, WorkerGroup

PLACE = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
)


class NeedsTwo(Exception):
    """Cannot be made again from its `args`, and has what cannot be sent."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"code {code}: {why}")
        self.code = code
        self.lock = threading.Lock()


class Talker(Worker):
    """Gates are FIFOs, one per rank, on which it waits until the test opens them."""

    kind = "talker"

    def __init__(self, greeting: str = "hello", *, fail_on_rank: int | None = None) -> None:
        super().__init__()
        self._greeting = greeting
        if self._rank == fail_on_rank:
            raise NeedsTwo(7, "told to fail")

    def count_to(self, number: int) -> Iterator[int]:
        yield from range(number)
        if not number:
            raise NeedsTwo(0, "nothing to count")

    def counted(self, number: int) -> int:
        """Its own generators are such within the worker."""
        return next(self.count_to(number))

    def greet(self, name: str, *, mark: str = "!") -> str:
        return f"{self._greeting} {name} from {self._rank}{mark}"

    def rank(self) -> int:
        return self._rank

    @staticmethod
    def add(left: int, right: int) -> int:
        return left + right

    def place(self) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in PLACE}

    def attributes(self) -> tuple[Any, ...]:
        return (
            self._rank,
            self._world_size,
            self._group_name,
            self._cluster_node_rank,
            self._node_local_rank,
            self._local_accelerator_rank,
            self.worker_address.get_name(),
            Worker.current_worker is self,
            self.torch_platform,
            self.torch_device_type,
        )

    def process(self) -> int:
        return os.getpid()

    def size_of(self, tensor: torch.Tensor) -> int:
        return tensor.numel()

    def all_reduce(self) -> float:
        torch.distributed.init_process_group("gloo")
        value = torch.tensor(float(self._rank + 1))
        torch.distributed.all_reduce(value)
        torch.distributed.destroy_process_group()
        return value.item()

    def fail(self, kind: str) -> None:
        if kind == "odd":
            raise NeedsTwo(self._rank, "as told")
        if kind == "exit":
            raise SystemExit(3)
        if kind == "unsendable result":
            return threading.Lock()  # type: ignore[return-value]
        raise KeyError(kind)

    def fail_or_wait(self, rank: int, gates: str) -> None:
        if self._rank == rank:
            raise KeyError("told to fail")
        self.wait_at(gates)

    def wait_at(self, gates: str) -> int:
        with open(Path(gates) / str(self._rank)):
            return self._rank

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def end_by(self, number: int) -> None:
        signal.raise_signal(number)

    def output(self) -> str:
        """The file that what it writes to stderr is in."""
        return os.readlink("/proc/self/fd/2")

    def timed(self) -> None:
        with self.worker_timer("part"):
            pass
        self.inner()

    @Worker.timer()
    def inner(self) -> None: ...

    def log(self, line: str) -> None:
        self.logger.info(line)

    def ranks_of(self, name: str) -> list[int]:
        """Asks the group of that name from here."""
        group = WorkerGroup.from_group_name(Talker, name)
        found: list[int] = group.execute_on(1, 0).rank().wait()
        return found

    def call(self, group: WorkerGroup[Talker]) -> list[int]:
        found: list[int] = group.rank().wait()
        return found

    def swap(self, value: Any, other: int) -> Any:
        """Sends to, and receives from, another of the group."""
        self.send(value, self._group_name, other)
        return self.recv(self._group_name, other)

    def expect_tensor(self, other: int) -> None:
        """Tells another of the group once it waits for its tensor."""
        receiving = self.recv_tensor(torch.zeros(2), self._group_name, other, async_op=True)
        self.send("ready", self._group_name, other)
        receiving.wait()

    def send_object_once_expected(self, other: int) -> None:
        self.recv(self._group_name, other)
        self.send("an object", self._group_name, other)

    def with_child(self) -> tuple[str, str]:
        """What a child process of this worker answers, and its address."""
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=be_child, args=(self.worker_address,))
        child.start()
        self.send("to the child", self._group_name, [self._rank, 0])
        answer = self.recv(self._group_name, [self._rank, 0])
        child.join()
        return answer

    def produce(self, channel: str, items: list[Any]) -> None:
        made = self.create_channel(channel)
        for item in items:
            made.put(item)

    def make_on(self, node_rank: int) -> None:
        self.create_channel("nowhere", node_rank=node_rank)

    def consume(self, channel: str, count: int) -> list[Any]:
        found = self.connect_channel(channel)
        return [found.get() for _ in range(count)]

    def consume_key(self, channel: str, key: str) -> Any:
        return self.connect_channel(channel).get(key=key)

    def spread(self, value: Any, groups: Any) -> Any:
        return self.broadcast(value if self._rank == 0 else None, groups)


class AsyncTalker(Worker):
    """Its methods run at the same time, in one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._opened = asyncio.Event()

    async def wait_for_open(self) -> str:
        await self._opened.wait()
        return f"opened on {self._rank}"

    async def open(self) -> None:
        self._opened.set()

    async def fail(self) -> None:
        raise NeedsTwo(1, "in async code")

    async def exit(self) -> None:
        raise SystemExit(1)

    async def count(self) -> AsyncIterator[int]:
        yield self._rank

    def plain(self) -> int:
        return self._rank


class Forgetful(Worker):
    def __init__(self) -> None:
        pass

    def rank(self) -> int:
        return self._rank


def be_child(parent: WorkerAddress) -> None:
    worker = Worker(parent, 1, 0)
    text = worker.recv(parent.root_group_name, parent.rank_path)
    worker.send((text, worker.worker_address.get_name()), parent.root_group_name, parent.rank_path)
    worker._close()
