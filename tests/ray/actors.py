"""Actors of these tests."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dataplane import BatchedDataDict, KVBatchMeta
from workers import TQWorkerMixin, Worker, WorkerAddress, WorkerGroup

# --- A policy worker that the tests start by name.


class Policy(TQWorkerMixin):
    """A tensor-parallel rank whose log-probs, loss and metrics are known functions of its samples."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.seen: dict[str, Any] = {}
        self.step: tuple[Any, list[int], list[float]] | None = None

    def _get_replica_group(self) -> Any:
        return self.mesh.get_group("tp")

    def _local_coords(self) -> dict[str, int]:
        return {"data_parallel": self.mesh.get_local_rank("dp"), "tensor_parallel": self.mesh.get_local_rank("tp")}

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        self.seen = {"fields": sorted(data), "shape": list(data["input_ids"].shape), "gbs": gbs, "mbs": mbs}
        self.seen["micro_batches"] = micro_batches(data)
        return self._trained(data["input_ids"][:, 0].tolist(), [float(data["advantages"].sum())])

    def _trained(self, ids: list[int], sums: list[float]) -> dict[str, Any]:
        loss = torch.tensor(sum(sums))
        dist.all_reduce(loss, group=self.mesh.get_group("dp"))
        return {"global_loss": float(loss), "all_mb_metrics": {"ids": ids}}

    def begin_train_step(self, *, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        """loss_fn: ("fail", where, ranks) makes these ranks raise there."""
        assert self.step is None, "a step is open"
        self._fail("begin", loss_fn)
        self.step = loss_fn, [], []
        self.seen = {"gbs": gbs, "mbs": mbs}

    def train_microbatch(self, *, data: BatchedDataDict[Any]) -> None:
        assert self.step is not None, "no step is open"
        loss_fn, ids, sums = self.step
        self._fail("train", loss_fn)
        ids += data["input_ids"][:, 0].tolist()
        sums.append(float(data["advantages"].sum()))

    def finish_train_step(self) -> dict[str, Any]:
        assert self.step is not None, "no step is open"
        loss_fn, ids, sums = self.step
        self._fail("finish", loss_fn)
        self.step = None
        return self._trained(ids, sums)

    def abort_train_step(self) -> None:
        step, self.step = self.step, None
        if step is not None:
            self._fail("abort", step[0])

    def _fail(self, here: str, loss_fn: Any) -> None:
        if isinstance(loss_fn, tuple) and loss_fn[1] == here and dist.get_rank() in loss_fn[2]:
            raise ArithmeticError(f"told to fail in {here}")

    def get_logprobs(self, *, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> Any:
        self.seen = {"fields": sorted(data), "micro_batch_size": micro_batch_size, "micro_batches": micro_batches(data)}
        return {"logprobs": -data["input_ids"].float()}

    def get_reference_policy_logprobs(self, *, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> Any:
        self.seen = {"fields": sorted(data)}
        return {"reference_logprobs": data["input_ids"].float()}

    def value_presharded(self, meta: KVBatchMeta, scale: float) -> int:
        """What a critic has besides: values of its own, as a column."""
        data = self._fetch(meta)
        cut = meta.extra_info.get("micro_batch_lengths")
        self.seen = {"fields": sorted(data), "task": meta.task_name, "micro_batches": cut}
        self._write_back_result_field(meta, {"v": scale * data["input_ids"]}, result_key="v", tq_field="values")
        return meta.size

    def what_was_seen(self) -> dict[str, Any]:
        return self.seen

    def client_config(self) -> Any:
        return self._require_dp_client().config

    def stop(self) -> None:
        self.close_data_plane()
        dist.destroy_process_group()


def micro_batches(data: BatchedDataDict[Any]) -> list[list[list[list[int]]]] | None:
    """Of each global batch, the micro-batches that its iterator gives, each as the shape of its tokens and the rows'
    first tokens; None where the batch has none."""
    if data.micro_batch_indices is None:
        return None
    batches = [data.get_batch(number) for number in range(len(data.micro_batch_indices))]
    return [
        [
            [list(part["input_ids"].shape), part["input_ids"][:, 0].tolist()]
            for part in batch.make_microbatch_iterator_with_dynamic_shapes()
        ]
        for batch in batches
    ]


# --- Worker classes for tests of how workers start. They import little, so that groups of them start
# fast.


class Starter:
    """Says where it is and what it was started with."""

    def __init__(self, **told: Any) -> None:
        self.told = told

    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def what_it_was_told(self) -> dict[str, Any]:
        return self.told

    def where(self) -> tuple[str, int, int]:
        """(node, NODE_RANK, LOCAL_RANK)."""
        return ray.get_runtime_context().get_node_id(), int(os.environ["NODE_RANK"]), int(os.environ["LOCAL_RANK"])

    def resources(self) -> dict[str, float]:
        return dict(ray.get_runtime_context().get_assigned_resources())

    def runtime_env(self) -> dict[str, Any]:
        return dict(ray.get_runtime_context().runtime_env)

    def serve_on(self, port: int) -> int:
        """Listen on a port until this process ends; returns it."""
        self.server = socket.create_server(("", port))
        return int(self.server.getsockname()[1])


class Configured(Starter):
    """Asks for all that a worker class can ask for."""

    _default_options = {  # noqa: RUF012 (Ray's own attribute of that name is a dict)
        "max_concurrency": 2,
        "runtime_env": {"env_vars": {"A_CLASS": "class", "A_DRIVER": "class"}},
    }

    @staticmethod
    def configure_worker(num_gpus: float, bundle_indices: tuple[int, list[int]] | None, num_gpus_per_node: int) -> Any:
        return (
            {"num_cpus": 0},
            {"A_WORKER": "worker", "RANK": "77"},
            {"bundle_indices": bundle_indices, "num_gpus": num_gpus, "num_gpus_per_node": num_gpus_per_node},
            {"config": {"setup_timeout_seconds": 123}, "env_vars": {"A_RUNTIME": "runtime"}},
        )


class Tied(Starter):
    @classmethod
    def configure_worker(cls, num_gpus: float, bundle_indices: tuple[int, list[int]] | None) -> Any:
        return None, None, {"bundle_indices": bundle_indices}


class OpenMinded(Starter):
    @staticmethod
    def configure_worker(**asked: Any) -> Any:
        return {}, {}, {"asked": sorted(asked)}


class Misconfigured:
    @staticmethod
    def configure_worker(num_gpus: float, bundle_indices: tuple[int, list[int]] | None) -> Any:
        return {}, {}


@ray.remote(num_cpus=0, concurrency_groups={"io": 1}, runtime_env={"env_vars": {"A_DECORATOR": "decorator"}})
class Decorated(Starter):
    pass


class Meeting(Starter):
    """Its constructor waits at a FIFO until the other worker's is there too."""

    def __init__(self, fifo: str) -> None:
        super().__init__()
        with open(fifo, "w" if os.environ["RANK"] == "0" else "r"):
            pass


class Refused(Exception):
    """Carries a fact."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Refusing:
    """Its constructor raises on one rank and waits for ever at a FIFO on the others."""

    def __init__(self, rank: int, fifo: str) -> None:
        if os.environ["RANK"] == str(rank):
            raise Refused(7)
        with open(fifo):
            pass


class Signalling:
    """Its constructor signals a process, then waits for ever at a FIFO."""

    def __init__(self, process: int, fifo: str) -> None:
        os.kill(process, signal.SIGUSR1)
        with open(fifo):
            pass


class Dying:
    def __init__(self) -> None:
        os._exit(3)


class Closed(Exception):
    """Cannot leave its process."""

    def __reduce__(self) -> Any:
        raise TypeError("closed")


class Unspeakable:
    def __init__(self) -> None:
        raise Closed("what it was")


# --- A worker class for tests of calls, results and ends. Imports little, so that groups of it start
# fast.


class TwoArguments(Exception):
    """Cannot be made again from its `args`."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"code {code}: {why}")
        self.code = code


class Member:
    """Answers with its rank. Gates are FIFOs, one per rank, on which it waits until the test opens them."""

    def __init__(self) -> None:
        self._rank = int(os.environ["RANK"])
        self._calls = 0

    def rank(self) -> int:
        return self._rank

    def echo(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        self._calls += 1
        return self._rank, args, kwargs

    def calls(self) -> int:
        """How often `echo` was called."""
        return self._calls

    def count_to(self, number: int) -> Iterator[int]:
        for value in range(number):  # noqa: UP028 (Ray drives generators with send())
            yield value

    def ranks_of(self, number: int) -> Iterator[int]:
        """Its rank, so many times."""
        for _ in range(number):
            yield self._rank

    def fail_with_two(self) -> None:
        raise TwoArguments(self._rank, "as told")

    def stream_and_fail_with_two(self) -> Iterator[int]:
        yield self._rank
        raise TwoArguments(self._rank, "as told")

    def catch_its_own(self) -> int:
        try:
            self.fail_with_two()
        except TwoArguments as error:
            return error.code
        raise AssertionError("nothing was raised")

    def fail_or_wait(self, rank: int, gates: str) -> int:
        if self._rank == rank:
            raise KeyError("told to fail")
        self.wait_at(gates)
        return self._rank

    def stream_and_fail_or_wait(self, rank: int, gates: str) -> Iterator[int]:
        yield self._rank
        if self._rank == rank:
            raise KeyError("told to fail")
        self.wait_at(gates)

    def wait_at(self, gates: str) -> None:
        with open(Path(gates) / str(self._rank)):
            pass

    def signal_and_wait(self, process: int, gates: str) -> None:
        os.kill(process, signal.SIGUSR1)
        self.wait_at(gates)

    def die(self) -> None:
        os._exit(1)

    def leave(self) -> None:
        """Clean up: leaves a file named after the rank."""
        (Path(os.environ["LEFT"]) / str(self._rank)).touch()

    def leave_or_fail(self) -> None:
        """As `leave`; rank 0 raises."""
        if self._rank == 0:
            raise RuntimeError("rank 0 cannot leave")
        self.leave()

    def wait_and_leave(self) -> None:
        self.wait_at(os.environ["GATES"])
        self.leave()


# --- Worker classes for tests of worker groups.


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
