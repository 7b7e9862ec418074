"""Settings of the service and its clients, and what of them is in the environment."""

from __future__ import annotations

import functools
import numbers
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dataplane.core.types import Checksums

MIB = 1 << 20
LONGEST_S = 2_000_000.0
"""Of a timeout: 23 days. A poll takes no more."""
GIB = 1 << 30

PATHS = ("arena_dir", "state_dir", "token_file", "tls_cert_file", "tls_key_file", "tls_ca_file")
DURABILITIES = ("process", "machine")
BULK_TRANSPORTS = ("zmq", "mooncake")
MOONCAKE_PROTOCOLS = ("tcp", "rdma")
OBJECTS = ("refuse", "pickle")

PUT_TIMEOUT_S = 60.0
"""How long puts wait for space where neither client nor service says."""

ENV_ADDRESS = "TQ_ADDRESS"
ENV_TOKEN = "TQ_TOKEN"
ENV_TLS = {
    "tls_cert_file": "TQ_TLS_CERT_FILE",
    "tls_key_file": "TQ_TLS_KEY_FILE",
    "tls_ca_file": "TQ_TLS_CA_FILE",
    "tls_server_name": "TQ_TLS_SERVER_NAME",
}


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files of one end of mutual TLS. server_name: what the other end's certificate is to be for, if that is not
    the host in its address."""

    cert_file: str
    key_file: str
    ca_file: str
    server_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class DataPlaneConfig:
    """Everything a service or a client can be told. Durations in seconds, sizes in bytes.

    address: where the controller answers, "host:port" or "actor:NAME[@NAMESPACE]"; None where a service is started.
    token: shared secret of the service, checked on every server; token_file names a file holding it.
    tls_cert_file, tls_key_file, tls_ca_file: mutual TLS, given all three or none: PEM files of this process's own
        certificate and key, and of the authority that signed the certificates of service, units and clients.
        tls_server_name: the name in the service's certificate, where it is not the host of its address.
    insecure: listen on other than loopback with neither token nor TLS.
    host, port: where the controller and its units listen (port 0: any free one). Loopback only without token, TLS or
        `insecure`. The controller takes two ports: gRPC at `port`, ZMQ, which our own clients use, one above. Units
        that it starts take any free one, a unit by itself (`tq unit`) `port`.
    http_port: where the controller answers browsers and Prometheus, on `host` too (0: any free one; None: nowhere).
        Units that it starts answer Prometheus: the first one port above, and so on, or each at any free one.
        open_metrics: the controller's /metrics is read without the token, by whoever reaches the port; nothing else is.
    capacity_bytes: size of each unit's arena; None takes a share of arena_dir that leaves space for Ray's object store.
    arena_dir: a local directory, /dev/shm by default; arenas lie in a directory of this user's own in it.
    units: storage units started with the controller.
    reserve_fraction: the part of capacity, and of every partition's budget, kept for updates of existing rows.
    low_watermark, high_watermark: parts of what new rows may take of a unit, or of a budget: from the high one on it
        is `pressed` in `stats()`, and the log has a warning, until it is down to the low one.
    heartbeat_s: how often a client says it lives; session_timeout_s: silence after which it is given up.
    call_timeout_s: how long a command that does not wait may take; connect_timeout_s: the same for connecting.
    put_timeout_s: how long a put waits for space: of a client, or of a service for clients that set none (None: as the
        service says, which says 60 s unless it is told).
    reconnect_s: how long clients of a service with a state_dir, and storage units of any, wait for its return when it
        is gone: calls meanwhile wait, each up to its own deadline; then they are `ServiceUnavailableError`.
    result_memory_bytes: memory of results that nobody holds any more, kept by each client for its next reads.
    copy_threads: how many threads of a client copy large columns to and from shared memory, the calling one included
        (1: it alone); None takes one for each core it may use, up to four.
    state_dir: a local directory from which the service goes on after its end, whatever way it ended; None: it does not.
    durability: which end a service with a state_dir survives: "process", its own; "machine", that of its machine too:
        rows and journal are fsynced before a call returns, and arena_dir has to be on a disk.
    checksums: of a service: which rows get a checksum from their writer, for their readers to compare. "across-hosts":
        all, while clients and storage units are on several hosts, else those that travel; who maps a row's memory does
        not compare it. "always": all, and all are compared (so by default with durability "machine"). "never".
    bulk_transport: how the bytes of rows travel between hosts: "zmq", or "mooncake", by Mooncake's transfer engine
        where a client and a unit both say so and have it. It encrypts nothing and admits anybody: docs/transports.md.
        mooncake_protocol: "tcp" or "rdma", with the devices in mooncake_device (by commas; "": any).
        mooncake_host: what others call this process's engine, where it is not the address that leads to them.
    objects: what a client does with objects that no column carries (`dataplane.data.object_codec`): "refuse", or
    "pickle": it
        pickles those that it puts, and unpickles those that it reads, so that a client that puts can have this process
        run anything. Only with a token or TLS, which keep others out. The service itself unpickles nothing.
    force_remote: never use shared memory, even on the same host (tests, measurements).
    """

    address: str | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_ca_file: str | None = None
    tls_server_name: str | None = None
    insecure: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    http_port: int | None = None
    open_metrics: bool = False
    capacity_bytes: int | None = None
    arena_dir: str = "/dev/shm"
    units: int = 1
    reserve_fraction: float = 0.15
    low_watermark: float = 0.75
    high_watermark: float = 0.9
    heartbeat_s: float = 2.0
    session_timeout_s: float = 20.0
    call_timeout_s: float = 30.0
    connect_timeout_s: float = 10.0
    put_timeout_s: float | None = None
    reconnect_s: float = 60.0
    result_memory_bytes: int = 512 * MIB
    copy_threads: int | None = None
    state_dir: str | None = None
    durability: str = "process"
    checksums: str = Checksums.ACROSS_HOSTS
    bulk_transport: str = "zmq"
    mooncake_protocol: str = "tcp"
    mooncake_device: str = ""
    mooncake_host: str | None = None
    objects: str = "refuse"
    force_remote: bool = False
    client_name: str = ""

    def __post_init__(self) -> None:
        self._check_types()
        for name in PATHS:
            if getattr(self, name) == "":
                raise ValueError(f'{name}="": the path is empty (an unset variable?); name one, or leave it out')
        if self.capacity_bytes is not None and self.capacity_bytes < MIB:
            raise ValueError(f"capacity_bytes={self.capacity_bytes}: an arena has at least {MIB} bytes (1 MiB)")
        if not 0 <= self.port < 65535:
            raise ValueError(f"port={self.port}: expected 0 to 65534, as the port above is taken, too")
        if self.http_port is not None and not 0 <= self.http_port < 65536:
            raise ValueError(f"http_port={self.http_port}: expected 0 to 65535, or None")
        if self.checksums not in list(Checksums):
            raise ValueError(f"checksums={self.checksums!r}: expected one of {', '.join(Checksums)}")
        if self.objects not in OBJECTS:
            raise ValueError(f"objects={self.objects!r}: expected one of {', '.join(OBJECTS)}")
        if self.result_memory_bytes < 0:
            raise ValueError(f"result_memory_bytes={self.result_memory_bytes}: cannot be negative")
        if self.copy_threads is not None and self.copy_threads < 1:
            raise ValueError(f"copy_threads={self.copy_threads}: expected 1 or more")
        if self.durability not in DURABILITIES:
            raise ValueError(f"durability={self.durability!r}: expected one of {', '.join(DURABILITIES)}")
        if self.durability == "machine" and self.state_dir is None:
            raise ValueError('durability="machine" needs a state_dir on a disk, from which the service goes on')
        self._check_transport()
        if self.units < 0:
            raise ValueError(f"units={self.units}: cannot be negative")
        if not 0.0 <= self.reserve_fraction < 1.0:
            raise ValueError(f"reserve_fraction={self.reserve_fraction}: must be in [0, 1)")
        if not 0.0 <= self.low_watermark <= self.high_watermark <= 1.0 or not self.high_watermark:
            marks = f"low_watermark={self.low_watermark}, high_watermark={self.high_watermark}"
            raise ValueError(f"{marks}: must be 0 <= low <= high <= 1, and high not 0")
        if not 0 <= self.reconnect_s <= LONGEST_S:
            raise ValueError(f"reconnect_s={self.reconnect_s}: must be 0 or more, and {LONGEST_S:,} s at most")
        for name in ("heartbeat_s", "session_timeout_s", "call_timeout_s", "connect_timeout_s", "put_timeout_s"):
            duration_s = getattr(self, name)
            if duration_s is not None and not 0 < duration_s <= LONGEST_S:
                raise ValueError(f"{name}={duration_s}: must be positive, and {LONGEST_S:,} s at most")
        files = {name: getattr(self, name) for name in ("tls_cert_file", "tls_key_file", "tls_ca_file")}
        missing = [name for name, file in files.items() if not file]
        if 0 < len(missing) < len(files):
            raise ValueError(f"TLS takes tls_cert_file, tls_key_file and tls_ca_file together; not set: {missing}")

    def _check_types(self) -> None:
        for name, kinds in _kinds().items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                expected = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
                raise TypeError(f"{name}={value!r}: expected {expected}, got {type(value).__name__}")

    def _check_transport(self) -> None:
        if self.bulk_transport not in BULK_TRANSPORTS:
            raise ValueError(f"bulk_transport={self.bulk_transport!r}: expected one of {', '.join(BULK_TRANSPORTS)}")
        if self.mooncake_protocol not in MOONCAKE_PROTOCOLS:
            expected = ", ".join(MOONCAKE_PROTOCOLS)
            raise ValueError(f"mooncake_protocol={self.mooncake_protocol!r}: expected one of {expected}")
        if self.bulk_transport == "mooncake" and self.tls is not None:
            raise ValueError(
                'bulk_transport="mooncake" with TLS: the transfer engine does not encrypt, so rows would travel in the '
                'open. Use bulk_transport="zmq", which does with TLS, or, on a network that is yours alone, no TLS'
            )

    @classmethod
    def of(cls, config: DataPlaneConfig | Mapping[str, Any] | None) -> DataPlaneConfig:
        """A config from one, from a plain mapping (unknown keys are a ValueError that names them), or the defaults."""
        if config is None:
            return cls()
        if isinstance(config, DataPlaneConfig):
            return config
        if not isinstance(config, Mapping):
            raise TypeError(f"expected a DataPlaneConfig or a mapping of settings, got {type(config).__name__}")
        known = {setting.name for setting in fields(cls)}
        unknown = sorted(set(config) - known)
        if unknown:
            raise ValueError(f"unknown data plane settings {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return cls(**config)

    def with_environment(self) -> DataPlaneConfig:
        """The same with address, token and TLS taken from TQ_ADDRESS, TQ_TOKEN and TQ_TLS_* where they are not set; the
        files of TLS all from one place."""
        names = ENV_TLS if self.tls is None else {}
        found: dict[str, Any] = {
            name: os.environ[variable] for name, variable in names.items() if os.environ.get(variable)
        }
        if self.tls_server_name:
            found.pop("tls_server_name", None)
        return replace(
            self,
            **found,
            address=self.address or os.environ.get(ENV_ADDRESS) or None,
            token=self.token or (None if self.token_file else os.environ.get(ENV_TOKEN) or None),
        )

    @property
    def tls(self) -> TlsFiles | None:
        """The files of mutual TLS; None: there is none."""
        if not (self.tls_cert_file and self.tls_key_file and self.tls_ca_file):
            return None
        return TlsFiles(
            cert_file=self.tls_cert_file,
            key_file=self.tls_key_file,
            ca_file=self.tls_ca_file,
            server_name=self.tls_server_name,
        )

    def of_unit(self, number: int) -> DataPlaneConfig:
        """What the storage unit `number`, from 0, of a service with this config is told."""
        return replace(self, port=0, http_port=self.http_port and self.http_port + 1 + number)

    def guarded(self) -> bool:
        """Whether a service may listen where others reach it: token, TLS, or an explicit `insecure`."""
        return self.insecure or self.tls is not None or self.secret() is not None

    @property
    def pickles(self) -> bool:
        """Whether a client with these settings pickles what no column carries."""
        return self.objects == "pickle"

    def secret(self) -> str | None:
        """The token, read from token_file where that is what is set. ValueError for one that is empty, which would let
        everybody in, and for what no header of HTTP and gRPC can hold."""
        where, token = "token", self.token
        if token is None and self.token_file is not None:
            where = f"token_file {self.token_file!r}"
            token = Path(self.token_file).read_text(encoding="utf-8").strip()
        if token is None:
            return None
        if not token:
            raise ValueError(f"{where} is empty")
        if not (token.isascii() and token.isprintable()) or token != token.strip():
            raise ValueError(f"{where} may only have printable ASCII characters, and no space at its ends")
        return token


@functools.cache
def _kinds() -> dict[str, tuple[type, ...]]:
    """What each setting may be."""
    wider: dict[type, tuple[type, ...]] = {
        int: (numbers.Integral,),
        float: (numbers.Real,),
        str: (str, os.PathLike),
    }
    return {
        name: tuple(kind for part in typing.get_args(hint) or (hint,) for kind in wider.get(part, (part,)))
        for name, hint in typing.get_type_hints(DataPlaneConfig).items()
    }
