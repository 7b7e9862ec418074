"""A cable between two network namespaces: a process that carries Ethernet frames from one to the other, late and with
losses, or not at all.

`python -m tests.faults.cable PID PID` makes a network device `DEVICE` in the namespaces of two processes. Each line of
its input is `DELAY_S LOSS`, from then on so (loss 1: the cable is cut); it answers each with a line.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import sys
import time

DEVICE = "tq0"
FRAME = 65536
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TAP, _NO_HEADER = 0x0002, 0x1000


def end_in(pid: int) -> int:
    """A descriptor of one end, a new device in the process's network namespace, which this thread enters."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _TAP | _NO_HEADER))
    return end


def carry(ends: tuple[int, int]) -> None:
    """Until the input ends."""
    delay_s, loss, chance = 0.0, 0.0, random.Random(7)
    late: list[tuple[float, int, int, bytes]] = []
    count = itertools.count()
    print("ready", flush=True)
    while True:
        wait_s = None if not late else max(0.0, late[0][0] - time.monotonic())
        ready, _, _ = select.select([*ends, sys.stdin], [], [], wait_s)
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            delay_s, loss = map(float, line.split())
            late = [] if loss == 1 else late
            print("done", flush=True)
        for end, other in (ends, ends[::-1]):
            if end in ready:
                frame = os.read(end, FRAME)
                if chance.random() >= loss:
                    heapq.heappush(late, (time.monotonic() + delay_s, next(count), other, frame))
        while late and late[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(late)
            try:
                os.write(end, frame)
            except (BlockingIOError, OSError):  # as a switch whose queue is full, or whose port is down
                continue


if __name__ == "__main__":
    carry((end_in(int(sys.argv[1])), end_in(int(sys.argv[2]))))
