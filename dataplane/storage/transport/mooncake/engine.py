"""The Mooncake transfer engine, as far as this package uses it: reads of a peer's registered memory, over RDMA or TCP.

What was found by trying version 0.3.13 over TCP, and what follows from it here and in `slots` and `by_engine`:

- A read that the library gave up after its own timeout goes on landing for as long as bytes come. So a transfer is over
  only when its status says so, and its target is left alone until then.
- It listens on every interface, whatever it is told, and asks nobody who he is; who reaches the port can read *and
  write* all that is registered. So no arena and nothing of a user's is ever registered, only slots that payloads pass
  through.
- The first transfer from a peer blocks for up to a minute if the peer accepts but does not answer.
- Its blocking calls keep a core busy until they return; so transfers are begun, and looked after with pauses.
- Ending an engine takes a second with the interpreter stopped. So engines are not ended: a closed one, with no memory
  registered, is used by whoever opens the next one in this process. What stays is two threads, five descriptors and two
  ports for each engine that was open at the same time.
- It writes to standard error what it does (MC_LOG_LEVEL=ERROR leaves two lines for each engine, both harmless).
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
"""Engines find each other by address alone, without a metadata service."""

PENDING, DONE, FAILED = 0, 1, -1

RDMA_DEVICES = Path("/sys/class/infiniband")


class EngineError(Exception):
    """The engine cannot be had, or refused; says why. Never leaves this package."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """host: what peers call this one; protocol: "rdma" or "tcp"; device: RDMA devices, by commas; "": it chooses."""

    host: str
    protocol: str
    device: str = ""


_idle: dict[tuple[int, EngineSettings], list[Any]] = {}
"""Engines without an owner, by process and settings: the one thing here that outlives its users (see above)."""
_guard = threading.Lock()


class Engine:
    """One owner's. `address` is where peers find it. Thread-safe, but for `close`, after which nothing may be called.

    EngineError, with what to do about it, where the wheel is missing or does not load, or finds no device.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        with _guard:
            idle = _idle.get((os.getpid(), settings))
            found = idle.pop() if idle else None
        self._engine: Any = _start(settings) if found is None else found
        self.address = join_address(settings.host, self._engine.get_rpc_port())

    def register(self, address: int, nbytes: int) -> None:
        """Let peers reach this memory, and transfers land in it."""
        code = self._engine.register_memory(address, nbytes)
        if code:
            raise EngineError(
                f"the transfer engine cannot register {nbytes:,} bytes (error {code}); with RDMA they are locked in "
                "memory: see `ulimit -l`"
            )

    def unregister(self, address: int) -> None:
        """Nobody reaches it any more, but for transfers that have begun."""
        self._engine.unregister_memory(address)

    def begin(self, peer: str, local: int, remote: int, nbytes: int) -> int:
        """Begin to read `nbytes` from `remote` in the peer's memory into `local`; the number to look after it by.
        Blocks only at the first transfer from a peer."""
        transfer = int(self._engine.batch_transfer_async_read(peer, [local], [remote], [nbytes]))
        if not transfer:
            raise EngineError(f"the transfer engine does not reach {peer}")
        return transfer

    def status(self, transfer: int) -> int:
        """PENDING, DONE or FAILED; after one of the last two the transfer must not be asked about again."""
        code = int(self._engine.transfer_check_status(transfer))
        return code if code in (PENDING, DONE) else FAILED

    def close(self, *, reusable: bool = True) -> None:
        """Nothing is registered, nothing under way: it may serve another owner. Else not `reusable`: it is left."""
        if reusable:
            with _guard:
                _idle.setdefault((os.getpid(), self._settings), []).append(self._engine)


def _start(settings: EngineSettings) -> Any:
    _require_devices(settings)
    try:
        library = importlib.import_module("mooncake.engine")
    except ModuleNotFoundError:
        raise EngineError(
            "no transfer engine is installed: pip install 'rl-dataplane[mooncake]', or, for CUDA, "
            "mooncake-transfer-engine"
        ) from None
    except ImportError as error:
        raise EngineError(
            f"the transfer engine does not load ({error}); it needs libibverbs1 and libcurl4 of the system"
        ) from error
    engine = library.TransferEngine()
    code = engine.initialize(settings.host, HANDSHAKE, settings.protocol, settings.device)
    if code:
        raise EngineError(f"the transfer engine does not start with {settings} (error {code})")
    make_immortal(engine)
    return engine


def _require_devices(settings: EngineSettings) -> None:
    """Without one the library would take TCP and say nothing."""
    if settings.protocol != "rdma":
        return
    found = {path.name for path in RDMA_DEVICES.glob("*")}
    wanted = {name.strip() for name in settings.device.split(",") if name.strip()}
    if not found or not wanted <= found:
        raise EngineError(
            f"mooncake_protocol is rdma, but the RDMA devices here are {sorted(found) or 'none'}"
            + (f", and mooncake_device wants {sorted(wanted)}" if wanted else "")
            + "; mooncake_protocol='tcp' needs none"
        )


def make_immortal(thing: object) -> None:
    """Never end it: not at exit, where an engine would take its second, nor in a forked child, which has the object but
    not its threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def address_of(memory: mmap.mmap) -> int:
    """Where a mapping begins. It can be unmapped all the same."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
