"""`tq`: run the service from a shell, look into a running one, save and restore what it holds.

Exit codes: 0 done, 1 the service refused or is not there (the message says why), 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

import dataplane
from dataplane.config import DURABILITIES, ENV_ADDRESS, ENV_TOKEN, GIB, MIB, DataPlaneConfig
from dataplane.control.channel import Channel
from dataplane.control.controller import Controller
from dataplane.descriptors import allow_more
from dataplane.errors import DataPlaneError
from dataplane.ledger import commands as c
from dataplane.types import Checksums
from dataplane.unit import StorageUnit
from dataplane.unit_process import Stop, UnitProcesses, run_unit

if TYPE_CHECKING:
    from dataplane import CheckpointInfo, DataPlaneClient

_SECURITY = {
    "--token-file": ("token_file", f"file with the service's token (default: {ENV_TOKEN})"),
    "--tls-cert": ("tls_cert_file", "mutual TLS: PEM file of this process's own certificate"),
    "--tls-key": ("tls_key_file", "PEM file of its key"),
    "--tls-ca": ("tls_ca_file", "PEM file of the authority that signed everybody's certificates"),
    "--tls-server-name": ("tls_server_name", "the name in the service's certificate, if not the host of its address"),
}
"""Flags of every command: setting and help."""
_SUFFIXES = {"": 1, "k": 1 << 10, "m": MIB, "g": GIB, "t": GIB << 10}


def size(text: str) -> int:
    """Bytes from "512m", "4g", "4GiB" or a plain number."""
    plain = text.strip().lower().removesuffix("ib").removesuffix("b")
    suffix = plain[-1:] if plain[-1:] in _SUFFIXES else ""
    try:
        return int(float(plain.removesuffix(suffix)) * _SUFFIXES[suffix])
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512m, 4g or a number of bytes") from None


def readable(count: int) -> str:
    """Bytes for a person: 1.5 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def serve(arguments: argparse.Namespace) -> int:
    """A controller in this process and each storage unit in a process of its own."""
    stop = Stop()
    allow_more()
    config = _service_config(arguments)
    controller = Controller(config).start()
    ends: list[str] = []

    def end(why: str) -> None:
        ends.append(why)
        stop.set()

    units = UnitProcesses(controller.address, config, end)
    try:
        units.start(arguments.units)
        if controller.recovered:
            print(f"going on with what was in {config.state_dir}", file=sys.stderr, flush=True)
        print(f"data plane service at {controller.address}", flush=True)
        stop.when(controller.ended)
        stop.wait()
        if controller.ended.is_set():
            ends.append("the controller cannot go on; see above")
        if ends and not stop.asked:
            print(f"tq: {ends[0]}; the service ends", file=sys.stderr)
            return 1
    finally:
        units.stop()
        controller.stop()
    return 0


def unit(arguments: argparse.Namespace) -> int:
    """A storage unit for a running controller, until a signal; exit code 1 if the controller goes first, and does not
    come back in time."""
    stop = Stop()
    allow_more()
    started = StorageUnit(_service_config(arguments), arguments.address, name=arguments.name)
    if run_unit(started, stop):
        print(f"tq: storage unit {started.name} lost its controller at {arguments.address}", file=sys.stderr)
        return 1
    return 0


def _service_config(arguments: argparse.Namespace) -> DataPlaneConfig:
    return DataPlaneConfig(
        host=arguments.host,
        port=getattr(arguments, "port", 0),
        capacity_bytes=arguments.capacity,
        arena_dir=arguments.arena_dir,
        insecure=arguments.insecure,
        **_security(arguments),
        reconnect_s=getattr(arguments, "reconnect", DataPlaneConfig.reconnect_s),
        session_timeout_s=getattr(arguments, "session_timeout", DataPlaneConfig.session_timeout_s),
        state_dir=arguments.state_dir,
        durability=arguments.durability,
        checksums=getattr(arguments, "checksums", Checksums.ACROSS_HOSTS),
    ).with_environment()


def status(arguments: argparse.Namespace) -> int:
    """Print what the service holds."""
    config = DataPlaneConfig(
        address=arguments.address, client_name="tq status", **_security(arguments)
    ).with_environment()
    channel = Channel.open(config)
    try:
        _, report = channel.call(c.Stats())
        assert isinstance(report, c.StatsReport)
    finally:
        channel.close()
    if arguments.json:
        print(msgspec.json.encode(report).decode())
    else:
        print(describe(config.address or "", report))
    return 0


def describe(address: str, report: c.StatsReport) -> str:
    """The report as text."""
    lines = [f"data plane service at {address}, epoch {report.epoch}"]
    for unit in report.units:
        used = unit.live_bytes + unit.reserved_bytes + unit.retired_bytes
        lines.append(
            f"  unit {unit.unit} {unit.name}: {readable(used)} of {readable(unit.capacity_bytes)} used"
            f" ({readable(unit.live_bytes)} live, {readable(unit.reserved_bytes)} reserved,"
            f" {readable(unit.pinned_bytes)} pinned), {readable(unit.peak_used_bytes)} at most"
            f"{', FILLING UP' if unit.pressed else ''}{'' if unit.connected else ', NOT CONNECTED'}"
        )
        lines += [f"    cannot grow: {unit.problem}"] if unit.problem else []
    for part in report.partitions:
        born = f"{part.born} born" if part.num_samples is None else f"{part.born} of {part.num_samples} born"
        held = f"{part.live} live ({readable(part.live_bytes)})"
        lines.append(f"  partition {part.partition}: {held}, {born}{', sealed' if part.sealed else ''}")
        if part.budget_bytes is not None:
            lines.append(
                f"    {readable(part.used_bytes)} of a budget of {readable(part.budget_bytes)} used,"
                f" {readable(part.peak_used_bytes)} at most{', FILLING UP' if part.pressed else ''}"
            )
        if part.evicted or part.evicted_unconsumed:
            lines.append(f"    {part.evicted} evicted, and {part.evicted_unconsumed} that were not consumed")
        if part.waiting_puts:
            lines.append(f"    {part.waiting_puts} puts waiting for room")
        lines += [f"    field {name}: {count} produced" for name, count in part.produced.items()]
        lines += [f"    task {name}: {count} of {part.live} claimed" for name, count in part.claimed.items()]
        if part.waiting_claims:
            lines.append(f"    {part.waiting_claims} claims waiting")
    lines.append(f"  {len(report.sessions)} sessions, {report.waiting_allocations} puts waiting for room")
    return "\n".join(lines)


def checkpoint(arguments: argparse.Namespace) -> int:
    """Save partitions into a directory."""
    with _connect(arguments) as client:
        done = client.checkpoint(arguments.path, arguments.partition)
    print(f"checkpoint of {summary(done)} at {done.path}")
    return 0


def restore(arguments: argparse.Namespace) -> int:
    """Bring partitions of a checkpoint back."""
    with _connect(arguments) as client:
        done = client.restore(arguments.path, arguments.partition, replace=arguments.replace)
    print(f"restored {summary(done)} from {done.path}")
    return 0


def shrink(arguments: argparse.Namespace) -> int:
    """Give memory back to the machine; exit code 1 if a unit did not."""
    with _connect(arguments) as client:
        done = client.shrink()
    for unit in done.units:
        problem = f" ({unit.error})" if unit.error else ""
        given, held = readable(unit.given_bytes), readable(unit.backed_bytes)
        print(f"unit {unit.unit} {unit.name}: {given} given back, {held} held{problem}")
    return 1 if any(unit.error for unit in done.units) else 0


def _connect(arguments: argparse.Namespace) -> DataPlaneClient:
    name = f"tq {arguments.run.__name__}"
    return dataplane.connect(arguments.address, client_name=name, **_security(arguments))


def _security(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name, _ in _SECURITY.values()}


def summary(done: CheckpointInfo) -> str:
    """What was saved or restored, in one line."""
    names = ", ".join(f"{name} ({count} samples)" for name, count in done.partitions.items())
    return f"{names or 'no partitions'}, {readable(done.nbytes)} in {done.files} files"


def parser() -> argparse.ArgumentParser:
    """The arguments of every command."""
    top = argparse.ArgumentParser(prog="tq", description="The data plane for RL post-training.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        for flag, (setting, help_text) in _SECURITY.items():
            metavar = "NAME" if setting == "tls_server_name" else "FILE"
            made.add_argument(flag, dest=setting, metavar=metavar, help=help_text)
        return made

    made = command("serve", serve, "Run a controller and its storage units until SIGTERM or SIGINT.")
    _add_memory(made)
    made.add_argument("--port", type=int, default=0, help="port of the controller (default: any free one, printed)")
    made.add_argument("--units", type=int, default=1, help="storage units to start (default: 1)")
    made.add_argument(
        "--session-timeout",
        type=float,
        default=DataPlaneConfig.session_timeout_s,
        help="seconds of silence after which a client that cannot be looked at is given up (default: 20)",
    )
    made.add_argument(
        "--checksums",
        choices=list(Checksums),
        default=Checksums.ACROSS_HOSTS,
        help="which rows get a checksum that readers compare (default: across-hosts)",
    )
    made = command("unit", unit, "Run one more storage unit for a running controller.")
    _add_memory(made)
    made.add_argument("address", help="host:port of the controller")
    made.add_argument("--name", help="name of the unit in reports")
    made.add_argument(
        "--reconnect", type=float, default=60.0, help="seconds to wait for a controller that is gone (default: 60)"
    )
    made = command("status", status, "Print what a service holds.")
    _add_address(made)
    made.add_argument("--json", action="store_true", help="print JSON")
    _add_address(command("shrink", shrink, "Give memory above what is used back to the machine."))
    made = command("checkpoint", checkpoint, "Save partitions into a directory, as they are at one instant.")
    _add_checkpoint(made)
    made = command("restore", restore, "Bring the partitions of a checkpoint back, all or none.")
    _add_checkpoint(made)
    made.add_argument("--replace", action="store_true", help="drop partitions of the same names that exist")
    return top


def _add_address(made: argparse.ArgumentParser) -> None:
    made.add_argument("address", nargs="?", help=f"host:port of the controller (default: {ENV_ADDRESS})")


def _add_checkpoint(made: argparse.ArgumentParser) -> None:
    _add_address(made)
    made.add_argument("path", help="directory of the checkpoint")
    made.add_argument("--partition", action="append", help="only this one; may be given again (default: all)")


def _add_memory(made: argparse.ArgumentParser) -> None:
    """What controllers and storage units are told."""
    made.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; another than loopback needs a token or TLS"
    )
    made.add_argument(
        "--insecure", action="store_true", help="listen on other than loopback with neither token nor TLS"
    )
    made.add_argument("--capacity", type=size, help="bytes per unit, as 512m or 4g (default: a share of the arena dir)")
    made.add_argument("--arena-dir", default="/dev/shm", help="local directory for arenas")
    made.add_argument("--state-dir", help="local directory from which the service goes on after its end")
    made.add_argument(
        "--durability",
        choices=DURABILITIES,
        default=DURABILITIES[0],
        help="which end it survives with a state directory: its process's, or its machine's (arenas on a disk)",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    parsed = parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
    except (DataPlaneError, ValueError, OSError) as error:
        print(f"tq: {error}", file=sys.stderr)
        return 1
    return code
