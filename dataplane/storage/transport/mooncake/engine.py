"""The part of the Mooncake transfer engine that this package uses: reads of a peer's registered memory by RDMA or TCP.

Tests of version 0.3.13 over TCP showed the following, with consequences here, in `slots` and in `engine_transport`:

- After the library's own timeout, an abandoned read continues to write while bytes arrive. A transfer therefore ends
  only when its status says so; its target is not reused before.
- The engine listens on every interface, whatever its settings, without authentication. Any process that reaches the
  port can read *and write* all registered memory. Therefore only slots are registered, never an arena or memory of a
  user.
- The first transfer from a peer blocks for up to a minute if the peer accepts the connection but does not reply.
- Blocking calls of the engine busy-wait on a core. Transfers are therefore asynchronous and polled with pauses.
- Destroying an engine holds the interpreter for one second. Engines are therefore never destroyed: a closed one,
  without registered memory, is reused by the next owner in this process. Each concurrently open engine costs two
  threads, five descriptors and two ports until the process ends.
- The engine logs to standard error (MC_LOG_LEVEL=ERROR leaves two harmless lines for each engine).
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.core.addresses import join_address

HANDSHAKE = "P2PHANDSHAKE"
"""Metadata setting by which engines find each other by address only, without a metadata service."""

PENDING = 0
DONE = 1
FAILED = -1

RDMA_DEVICES = Path("/sys/class/infiniband")


class EngineError(Exception):
    """The engine is unavailable or rejected a request, with the reason. Never leaves this package."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """host: this engine's host for peers; protocol: "rdma" or "tcp"; device: comma-separated RDMA devices; "": any."""

    host: str
    protocol: str
    device: str = ""


_idle: dict[tuple[int, EngineSettings], list[Any]] = {}
"""Closed engines for reuse, by process and settings (see the module docstring)."""
_guard = threading.Lock()  # of `_idle`


class Engine:
    """A transfer engine with one owner. `address` is its address for peers. Thread-safe, except for `close`, after
    which no method may be called.

    Raises EngineError, with the remedy, if the wheel is missing or does not load, or if no device is present.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        with _guard:
            idle = _idle.get((os.getpid(), settings))
            reused = idle.pop() if idle else None
        self._engine: Any = _start_engine(settings) if reused is None else reused
        self.address = join_address(settings.host, self._engine.get_rpc_port())

    def register(self, address: int, nbytes: int) -> None:
        """Register this memory for access by peers and as the target of transfers. Raises EngineError."""
        code = self._engine.register_memory(address, nbytes)
        if code:
            raise EngineError(
                f"the transfer engine cannot register {nbytes:,} bytes (error {code}); RDMA locks them in memory: "
                "check `ulimit -l`"
            )

    def unregister(self, address: int) -> None:
        """Unregister this memory. Transfers that have begun may still access it."""
        self._engine.unregister_memory(address)

    def begin(self, peer: str, local: int, remote: int, nbytes: int) -> int:
        """Start to read `nbytes` from `remote` in the peer's memory into `local`. Return the transfer's id for
        `status`. Blocks only at the first transfer from a peer. Raises EngineError."""
        transfer = int(self._engine.batch_transfer_async_read(peer, [local], [remote], [nbytes]))
        if not transfer:
            raise EngineError(f"the transfer engine cannot reach {peer}")
        return transfer

    def status(self, transfer: int) -> int:
        """Return PENDING, DONE or FAILED. After DONE or FAILED, do not query the transfer again."""
        code = int(self._engine.transfer_check_status(transfer))
        return code if code in (PENDING, DONE) else FAILED

    def close(self, *, reusable: bool = True) -> None:
        """Release the engine. reusable: no memory is registered and no transfer is in flight, so another owner may
        use the engine; otherwise it is never used again."""
        if reusable:
            with _guard:
                _idle.setdefault((os.getpid(), self._settings), []).append(self._engine)


def _start_engine(settings: EngineSettings) -> Any:
    """Return a new engine of the library. Raises EngineError as `Engine` does."""
    _require_devices(settings)
    try:
        library = importlib.import_module("mooncake.engine")
    except ModuleNotFoundError:
        raise EngineError(
            "no transfer engine is installed; run pip install 'rl-dataplane[mooncake]' or, for CUDA, "
            "pip install mooncake-transfer-engine"
        ) from None
    except ImportError as error:
        raise EngineError(
            f"cannot load the transfer engine ({error}); install the system packages libibverbs1 and libcurl4"
        ) from error
    engine = library.TransferEngine()
    code = engine.initialize(settings.host, HANDSHAKE, settings.protocol, settings.device)
    if code:
        raise EngineError(f"cannot start the transfer engine with {settings} (error {code})")
    make_immortal(engine)
    return engine


def _require_devices(settings: EngineSettings) -> None:
    """Raise EngineError if RDMA devices are missing; the library would silently fall back to TCP."""
    if settings.protocol != "rdma":
        return
    present = {path.name for path in RDMA_DEVICES.glob("*")}
    configured = {name.strip() for name in settings.device.split(",") if name.strip()}
    if not present or not configured <= present:
        raise EngineError(
            f"mooncake_protocol is rdma, but this machine has the RDMA devices {sorted(present) or 'none'}"
            + (f" and mooncake_device is {sorted(configured)}" if configured else "")
            + "; mooncake_protocol='tcp' needs no device"
        )


def make_immortal(value: object) -> None:
    """Prevent the destruction of an object: at exit, where destroying an engine takes a second, and in a forked child,
    which has the object without its threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def address_of(memory: mmap.mmap) -> int:
    """Return the start address of a mapping. The mapping can still be closed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
