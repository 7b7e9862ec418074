"""Flags that several verbs have, as groups: a verb has a parameter whose type is the group."""

from __future__ import annotations

import copy
import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal

import typer

from dataplane.cli.formatting import size
from dataplane.config import ENV_ADDRESS, ENV_TOKEN, DataPlaneConfig

_security = functools.partial(typer.Option, rich_help_panel="Security")
_memory = functools.partial(typer.Option, rich_help_panel="Memory and state")
_transport = functools.partial(typer.Option, rich_help_panel="Transport of rows")
_http = functools.partial(typer.Option, rich_help_panel="Page and metrics")

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Address = Annotated[
    str | None, typer.Argument(metavar="[ADDRESS]", help=f"host:port of the controller (default: {ENV_ADDRESS}).")
]


@dataclass(frozen=True, kw_only=True)
class Security:
    """How this end shows who it is."""

    token_file: Annotated[
        str | None,
        _security(metavar="FILE", help=f"File with the service's token (default: {ENV_TOKEN})."),
    ] = None
    tls_cert_file: Annotated[
        str | None,
        _security("--tls-cert", metavar="FILE", help="Mutual TLS: PEM file of this process's own certificate."),
    ] = None
    tls_key_file: Annotated[str | None, _security("--tls-key", metavar="FILE", help="PEM file of its key.")] = None
    tls_ca_file: Annotated[
        str | None,
        _security("--tls-ca", metavar="FILE", help="PEM file of the authority that signed everybody's certificates."),
    ] = None
    tls_server_name: Annotated[
        str | None,
        _security(metavar="NAME", help="The name in the service's certificate, if not the host of its address."),
    ] = None

    def settings(self) -> dict[str, Any]:
        """As `DataPlaneConfig` takes them."""
        return {flag.name: getattr(self, flag.name) for flag in fields(Security)}


@dataclass(frozen=True, kw_only=True)
class TargetFlags(Security):
    """Which service, and how to get in."""

    at: Annotated[
        str | None,
        typer.Option(
            "--address", "-a", metavar="ADDRESS", help=f"host:port of the controller (default: {ENV_ADDRESS})."
        ),
    ] = None

    def config(self, name: str, address: str | None = None) -> DataPlaneConfig:
        """Settings of a client that is called `name`; address: as named without a flag. A wrong argument if it is named
        twice, or nowhere."""
        config = self.config_if_any(name, address)
        if not config.address:
            raise typer.BadParameter(
                f"none is given: name the host:port that `tq serve` printed, or set {ENV_ADDRESS}",
                param_hint="--address",
            )
        return config

    def config_if_any(self, name: str, address: str | None = None) -> DataPlaneConfig:
        """The same, without an address where none is named."""
        if address is not None and self.at is not None:
            raise typer.BadParameter(f"{self.at}, and {address} besides; name one", param_hint="--address")
        return DataPlaneConfig(
            address=address or self.at, client_name=f"tq {name}", **self.settings()
        ).with_environment()


@dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    """What controllers and storage units are told."""

    host: Annotated[
        str,
        _security(metavar="HOST", help="Address to listen on; another than loopback needs a token or TLS."),
    ] = "127.0.0.1"
    insecure: Annotated[
        bool,
        _security("--insecure", help="Listen on other than loopback with neither token nor TLS."),
    ] = False
    capacity: Annotated[
        int | None,
        _memory(parser=size, metavar="SIZE", help="Bytes per unit, as 512m or 4g (default: a share of the arena dir)."),
    ] = None
    arena_dir: Annotated[str, _memory(metavar="DIR", help="Local directory for arenas.")] = "/dev/shm"
    state_dir: Annotated[
        str | None,
        _memory(metavar="DIR", help="Local directory from which the service goes on after its end."),
    ] = None
    durability: Annotated[
        Literal["process", "machine"],
        _memory(
            help="Which end it survives with a state directory: its process's, or its machine's (arenas on a disk)."
        ),
    ] = "process"

    bulk_transport: Annotated[
        Literal["zmq", "mooncake"],
        _transport(
            help="How rows travel between hosts; mooncake: by transfer engine, for clients that want it too (extra "
            "mooncake). It encrypts nothing and admits anybody who reaches it."
        ),
    ] = "zmq"
    mooncake_protocol: Annotated[Literal["tcp", "rdma"], _transport(help="What the transfer engine uses.")] = "tcp"
    mooncake_device: Annotated[str, _transport(metavar="NAMES", help="RDMA devices, by commas (default: any).")] = ""
    mooncake_host: Annotated[
        str | None,
        _transport(metavar="HOST", help="What clients call the transfer engine (default: --host)."),
    ] = None

    def settings(self) -> dict[str, Any]:
        """As `DataPlaneConfig` takes them."""
        settings = asdict(self)
        settings["capacity_bytes"] = settings.pop("capacity")
        return settings


@dataclass(frozen=True, kw_only=True)
class Http:
    """Where browsers and Prometheus are answered."""

    ui: Annotated[
        bool,
        _http("--ui", help="Answer browsers: a page that shows what is inside."),
    ] = False
    metrics: Annotated[
        bool,
        _http("--metrics", help="Answer Prometheus, at /metrics (the same server as the page)."),
    ] = False
    http_port: Annotated[
        int | None,
        _http(
            min=0,
            max=65535,
            metavar="PORT",
            help="Port for both (default: two above --port, or any free one, printed). Storage units answer "
            "Prometheus at the ports that follow.",
        ),
    ] = None

    def port(self, port: int) -> int | None:
        """Where HTTP is served by a service at `port`; None: nowhere."""
        if self.http_port is not None:
            return self.http_port
        if not (self.ui or self.metrics):
            return None
        return port + 2 if port else 0


def verb(run: Callable[..., int]) -> Callable[..., int]:
    """`run` as typer takes it: instead of each parameter whose type is a group of flags, the flags of that group. Its
    docstring is the help, a line to a paragraph: terminals break lines where they end."""
    hints = typing.get_type_hints(run, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(run).parameters.values():
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            parameters.append(_keyword(parameter.name, kind, parameter.default))
            continue
        groups[parameter.name] = kind
        types = typing.get_type_hints(kind, include_extras=True)
        parameters += [_keyword(flag.name, types[flag.name], flag.default) for flag in fields(kind)]

    @functools.wraps(run)
    def expanded(**given: Any) -> int:
        for name, kind in groups.items():
            given[name] = kind(**{flag.name: given.pop(flag.name) for flag in fields(kind)})
        return run(**given)

    expanded.__doc__ = "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(run) or "").split("\n\n"))
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _keyword(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """Flags that take no value show none in help."""
    if typing.get_origin(kind) is Annotated and typing.get_args(kind)[0] is bool:
        option = copy.copy(typing.get_args(kind)[1])
        option.metavar = ""
        kind = Annotated[bool, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
