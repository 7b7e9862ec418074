"""Worker classes for tests of what workers have beside messages: logs, ports, locks, batches between groups."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

import torch

from workers import Channel
from workers.groups.device_lock import DeviceLock
from workers.rlinf import Worker


class Courier(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.batch_router: dict[str, list[str]] = {}

    def logged(self, method: str) -> tuple[str, str, str, str]:
        """The same by a method that calls another."""
        (line,) = self.records(method)
        return line

    def records(self, method: str) -> list[tuple[str, str, str, str]]:
        """Level, text, function and file of what that method logs here."""
        found: list[tuple[str, str, str, str]] = []

        class Keep(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                place = Path(record.pathname).name
                found.append((record.levelname, record.getMessage(), record.funcName or "", place))

        handler = Keep()
        assert self._logger is self.logger is Worker.logger
        self._logger.addHandler(handler)
        self._logger.setLevel("DEBUG")
        try:
            getattr(self, method)(f"100% of {method}")
        finally:
            self._logger.removeHandler(handler)
        return found

    def ports(self, count: int, highest: int | None = None) -> list[int]:
        found = [self.acquire_free_port(highest) for _ in range(count)]
        socket.create_server(("", found[0])).close()
        return found

    def see(self, devices: str) -> None:
        """As on a node that has accelerators of these numbers."""
        self._device_lock = DeviceLock(self.worker_address.get_name(), devices.split(","), "a job")

    def use(self, log: str, times: int) -> None:
        """Write when it begins and ends to use its accelerators."""
        for _ in range(times):
            with self.device_lock, open(log, "a") as file:
                file.write(f"{self._rank} begins\n")
                file.flush()
                file.write(f"{self._rank} ends\n")

    def use_and_die(self) -> None:
        self.device_lock.acquire()
        os._exit(1)

    def deliver(self, to: str, rows: int, channel: Channel | None, **more: Any) -> None:
        """Send this rank's rows of 0 to `rows` - 1."""
        mine = rows // self._world_size
        first = self._rank * mine
        data = {"row": torch.arange(first, first + mine), "text": [str(row) for row in range(first, first + mine)]}
        work = self.send_to(to, channel, data, **more)
        if work is not None:
            work.wait()

    def collect(self, of: str, rows: int, channel: Channel | None, **more: Any) -> tuple[list[int], list[str]]:
        got = self.recv_from(of, channel, batch_size=rows, **more)
        if more.get("async_op"):
            got = got.wait()
        return got["row"].tolist(), got["text"]

    def ask(self, to: str, rows: int, out: Channel, back: Channel) -> list[int]:
        """Of a decoupled exchange: send rows, and get them back doubled."""
        self.deliver(to, rows, out, tag="obs", mode="train", decoupled_mode=True)
        got = self.recv_from(to, back, tag="obs", batch_size=rows, decoupled_mode=True)
        found: list[int] = got.tolist()
        return found

    def answer(self, of: str, rows: int, out: Channel, back: Channel) -> int:
        """Of a decoupled exchange: double what came; its rows."""
        self.batch_router["obs"] = []
        got = self.recv_from(of, out, tag="obs", batch_size=rows, decoupled_mode=True)
        self.send_to(of, back, got["row"] * 2, tag="obs", batch_size=rows, decoupled_mode=True)
        assert self.batch_router == {"obs": []}
        return len(got["text"])
