"""`tq top`, and the throughput of a service, read from its HTTP port (`tq serve --metrics`)."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import msgspec
import typer

from dataplane.cli.flags import Address, Json, TargetFlags
from dataplane.cli.output import ago, console, counted, duration, print_json, readable, shown, table
from dataplane.cli.session import not_shown, session, stats, waits, waits_not_shown
from dataplane.config import DataPlaneConfig
from dataplane.core.addresses import split_address
from dataplane.errors import ServiceUnavailableError

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType

    from dataplane.client.rpc.channel import ControllerChannel
    from dataplane.controller.metrics.history import FlowReport
    from dataplane.ledger import commands as c

_BAR = 20
"""Width in characters of the bar that shows how full a unit is."""
_LEAST_UNITS = 4
"""Minimum number of units on a terminal. On a tall terminal, units take a third of the lines."""
_UNIT_COLUMNS = ("unit", "", ">used", ">of", ">peak", ">pinned", ">extents", "")
_PARTITION_COLUMNS = (
    "partition",
    ">live",
    ">bytes",
    ">born",
    ">of",
    ">new/s",
    ">dropped/s",
    ">bytes/s",
    ">version",
    "",
)
_TASK_COLUMNS = ("task", "of partition", ">ready", ">leased", ">held", ">claimed", ">lag", ">waiting", "wants")
_SHORTEST_S = 0.1
_LONGEST_S = 86400
_WAIT_COLUMNS = ("waits", "for", "of partition", ">wants", ">ready", ">since", ">times out in")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A snapshot of a service: statistics and waiting calls at `at_s` (this process's monotonic clock), and the
    throughput before that time (None: not requested)."""

    at_s: float
    report: c.StatsReport
    waits: c.WaitList
    flow: FlowRates | None = None


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one partition per second: samples `born`, samples `dropped` (cleared or evicted), and growth of the live
    bytes. None if the partition is new or was registered again in between."""

    born: float | None = None
    dropped: float | None = None
    grown_bytes: float | None = None


def _interval(text: str) -> float:
    """Parse the value of --interval."""
    interval_s = duration(text)
    if not _SHORTEST_S <= interval_s <= _LONGEST_S:
        raise typer.BadParameter(f"{text} is not in the range {_SHORTEST_S} to {_LONGEST_S} seconds")
    return interval_s


def top(
    *,
    address: Address = None,
    interval: Annotated[
        float, typer.Option("--interval", "-i", parser=_interval, metavar="SECONDS", help="Time between two updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", metavar="", help="Show one interval, then exit.")] = False,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="HTTP port of the service, as `tq serve --metrics` printed it, to also show its throughput.",
        ),
    ] = None,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Watch a service: rates per second, memory use, the state of each task, and the calls that wait.

    On a terminal until Ctrl-C, updated in place; otherwise as one frame after another, with --json one per line.
    """
    config = target.config("top", address)
    query_flow = None if http is None else _flow_query(http, config, interval)
    with session(config) as channel:
        frames = _snapshot_pairs(lambda: take_snapshot(channel, query_flow), interval)
        try:
            _watch(config.address or "", frames, once=once, json=json)
        except KeyboardInterrupt:
            return 0
    return 0


def _flow_query(url: str, config: DataPlaneConfig, interval: float) -> Callable[[], FlowRates]:
    """Return a function that queries the service's throughput in the last `interval` seconds. url: that of --http;
    raises `BadParameter` if it is invalid."""
    try:
        host_port = parse_http_address(url, config.address or "")
    except ValueError:
        raise typer.BadParameter(f"{url!r} is not a URL, host:port or port", param_hint="--http") from None
    return lambda: fetch_rates(host_port, config, interval)


def _snapshot_pairs(take: Callable[[], Snapshot], interval: float) -> Iterator[tuple[Snapshot, Snapshot]]:
    """Yield (previous snapshot, latest snapshot) forever, one pair per `interval` seconds."""
    before = take()
    while True:
        time.sleep(interval)  # the service has no notification for changes
        after = take()
        yield before, after
        before = after


def take_snapshot(channel: ControllerChannel, flow: Callable[[], FlowRates] | None = None) -> Snapshot:
    """Take a snapshot of the service. flow: queries its throughput (None: the snapshot has none)."""
    return Snapshot(
        at_s=time.monotonic(),
        report=stats(channel),
        waits=waits(channel),
        flow=None if flow is None else flow(),
    )


def rates(before: Snapshot, after: Snapshot) -> dict[str, Rates]:
    """Return the rates of each partition in `after`, by its name."""
    seconds = max(after.at_s - before.at_s, 1e-6)  # never 0: it is a divisor
    earlier = {partition.partition: partition for partition in before.report.partitions}
    return {
        partition.partition: _partition_rates(earlier.get(partition.partition), partition, seconds)
        for partition in after.report.partitions
    }


def _partition_rates(before: c.PartitionStats | None, after: c.PartitionStats, seconds: float) -> Rates:
    """Return the rates of one partition. before: its earlier statistics, or None if it is new."""
    if before is None or after.born < before.born:  # fewer samples ever born: it was registered again
        return Rates()
    born = after.born - before.born
    return Rates(
        born=born / seconds,
        # Each born sample raises the number of live samples by one, each dropped sample lowers it by one.
        dropped=(born - (after.live - before.live)) / seconds,
        grown_bytes=(after.live_bytes - before.live_bytes) / seconds,
    )


def as_json(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Return two snapshots as JSON: the `seconds` between them, the latest report, waits and flow, and the rates of
    each partition."""
    return {
        "seconds": after.at_s - before.at_s,
        "report": after.report,
        "waits": after.waits.waits,
        "rates": rates(before, after),
        "flow": after.flow,
    }


def _watch(address: str, frames: Iterator[tuple[Snapshot, Snapshot]], *, once: bool, json: bool) -> None:
    """Show the frames: updated in place on a terminal, otherwise printed one after another. Return after the first if
    `once` is set. json: print each as one line of JSON, on a terminal, too."""
    screen = console()
    if not (once or json) and screen.is_terminal:
        _watch_on_screen(address, frames, screen)
        return
    for before, after in frames:
        if json:
            print_json(as_json(before, after))
        else:
            screen.print(frame(address, before, after))
        if once:
            return
        if not json:
            print(flush=True)  # an empty line before the next frame


def _watch_on_screen(address: str, frames: Iterator[tuple[Snapshot, Snapshot]], screen: Console) -> None:
    """Show the frames on a terminal, each in place of the previous one."""
    from rich.live import Live

    with Live(f"connecting to {address} ...", console=screen, screen=True, auto_refresh=False) as live:
        for before, after in frames:
            live.update(frame(address, before, after, most_units=max(screen.height // 3, _LEAST_UNITS)), refresh=True)


def frame(address: str, before: Snapshot, after: Snapshot, *, most_units: int | None = None) -> Group:
    """Return the view of the interval between two snapshots. most_units: the number of units shown at most (None: all);
    see `_select_units`."""
    from rich.console import Group
    from rich.text import Text

    report = after.report
    partition_rates = rates(before, after)
    renderables: list[RenderableType] = [Text(_summary(address, after, partition_rates), style="bold")]
    if after.flow is not None:
        renderables.append(Text(_flow_summary(after.flow), style="bold"))

    def add_table(columns: Sequence[str], rows: list[tuple[object, ...]]) -> None:
        """Add an empty line and a table, unless it has no rows."""
        if rows:
            renderables.extend(["", table(columns, rows)])

    units = _select_units(report.units, most_units)
    add_table(_UNIT_COLUMNS, [_unit_row(unit) for unit in units])
    hidden = len(report.units) - len(units)
    if hidden:
        renderables.append(f"and {counted(hidden, 'more unit')}; `tq status` lists them")
    add_table(
        _PARTITION_COLUMNS,
        [_partition_row(partition, partition_rates[partition.partition]) for partition in report.partitions],
    )
    if not_shown(report):
        renderables.append(not_shown(report))
    add_table(
        _TASK_COLUMNS, [_task_row(partition, task) for partition in report.partitions for task in partition.tasks]
    )
    add_table(_WAIT_COLUMNS, [_wait_row(wait, after.waits.now) for wait in after.waits.waits])
    if waits_not_shown(after.waits):
        renderables.append(waits_not_shown(after.waits))
    return Group(*renderables)


def _select_units(units: Sequence[c.UnitStats], most: int | None) -> Sequence[c.UnitStats]:
    """Return at most `most` units in their original order, preferring units with problems, then the fullest."""
    if most is None or len(units) <= most:
        return units
    # False sorts before True: units with problems come first.
    by_priority = sorted(
        units, key=lambda unit: (unit.connected and not unit.problem, -unit.used_bytes / unit.capacity_bytes)
    )
    chosen = {unit.unit for unit in by_priority[:most]}
    return [unit for unit in units if unit.unit in chosen]


def _summary(address: str, after: Snapshot, partition_rates: dict[str, Rates]) -> str:
    """Return the first line: memory of all units, new samples, clients and waiting calls."""
    report = after.report
    born_per_s = sum(rate.born or 0.0 for rate in partition_rates.values())  # None (a new partition) counts as 0
    used = sum(unit.used_bytes for unit in report.units)
    capacity = sum(unit.capacity_bytes for unit in report.units)
    clients = len(report.sessions) - 1  # without this command
    return (
        f"{address}   {readable(used)} of {readable(capacity)} used   {born_per_s:,.1f} new samples/s   "
        f"{counted(clients, 'client')}   {counted(after.waits.total, 'call')} waiting"
    )


def _flow_summary(flow: FlowRates) -> str:
    """Return the line with the throughput of the service."""
    return (
        f"per second: {flow.puts:,.0f} samples put ({readable(flow.put_bytes)}), {flow.gets:,.0f} got "
        f"({readable(flow.get_bytes)}), {flow.claims:,.0f} claimed, {flow.clears:,.0f} cleared"
    )


def _unit_row(unit: c.UnitStats) -> tuple[object, ...]:
    """Return a storage unit as a row of `_UNIT_COLUMNS`."""
    notes = ["NOT CONNECTED"] if not unit.connected else []
    notes += ["FILLING UP"] if unit.pressed else []
    notes += ["DRAINING"] if unit.draining else []
    notes += [f"cannot grow: {unit.problem}"] if unit.problem else []
    filled = round(_BAR * unit.used_bytes / unit.capacity_bytes)
    return (
        f"{unit.unit} {shown(unit.name)}",
        "#" * filled + "." * (_BAR - filled),
        readable(unit.used_bytes),
        readable(unit.capacity_bytes),
        readable(unit.peak_used_bytes),
        readable(unit.pinned_bytes),
        unit.extents,
        _warning(", ".join(notes)),
    )


def _partition_row(partition: c.PartitionStats, rate: Rates) -> tuple[object, ...]:
    """Return a partition as a row of `_PARTITION_COLUMNS`."""
    notes = ["sealed"] if partition.sealed else []
    notes += ["FILLING UP"] if partition.pressed else []
    notes += [f"{counted(partition.waiting_puts, 'put')} waiting"] if partition.waiting_puts else []
    evicted = partition.evicted + partition.evicted_unconsumed
    notes += [f"{evicted} evicted"] if evicted else []
    return (
        shown(partition.partition),
        partition.live,
        readable(partition.live_bytes),
        partition.born,
        "-" if partition.num_samples is None else partition.num_samples,
        _format_rate(rate.born),
        _format_rate(rate.dropped),
        "-" if rate.grown_bytes is None else readable(rate.grown_bytes),
        "-" if partition.version is None else partition.version,
        _warning(", ".join(notes)),
    )


def _format_rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _task_row(partition: c.PartitionStats, task: c.TaskStats) -> tuple[object, ...]:
    """Return a task of a partition as a row of `_TASK_COLUMNS`."""
    wants = ", ".join(map(shown, task.fields)) or "(has not claimed)"
    lag: object = task.lag
    if lag is None:
        # "version not set": samples have a version, but the partition has none to compare it with.
        lag = "version not set" if partition.version is None and task.stalest_version is not None else "-"
    names = shown(task.task), shown(partition.partition)
    return *names, task.ready, task.leased, task.held, task.claimed, lag, task.waiting, wants


def _wait_row(wait: c.Wait, now: float) -> tuple[object, ...]:
    """Return a waiting call as a row of `_WAIT_COLUMNS`: a put that waits for bytes, or a claim that waits for samples.
    now: the time of the service."""
    if wait.task == "":  # a put
        what = "space"
        wanted = readable(wait.wanted)
        ready = readable(wait.ready)
    else:
        what = f"task {shown(wait.task)}: {', '.join(map(shown, wait.fields)) or 'any sample'}"
        wanted = str(wait.wanted)
        ready = str(wait.ready)
    times = ago(now - wait.since), ago(wait.until - now)
    return shown(wait.client), what, shown(wait.partition), wanted, ready, *times


def _warning(text: str) -> RenderableType:
    """Return the text in the colour of warnings."""
    from rich.text import Text

    return Text(text, style="bold yellow")


_WAIT_S = 5.0
"""Time limit of the connection and of each read."""
_PATH = "/api/flow"
_LONGEST_MEAN_S = 60
"""Maximum time in seconds over which rates are averaged."""


@dataclass(frozen=True, kw_only=True)
class FlowRates:
    """Samples and bytes per second."""

    puts: float
    put_bytes: float
    gets: float
    get_bytes: float
    claims: float
    clears: float


def parse_http_address(text: str, address: str) -> tuple[str, int]:
    """Parse a URL, host:port, or a port on the host of `address` to (host, port). Raises ValueError for anything
    else."""
    # `urlsplit` finds a host only after "//".
    if text.isascii() and text.isdigit():
        text = f"//{address.rpartition(':')[0]}:{text}"
    elif "//" not in text:
        text = f"//{text}"
    return split_address(urlsplit(text).netloc)


def fetch_rates(host_port: tuple[str, int], config: DataPlaneConfig, seconds: float) -> FlowRates:
    """Return the mean rates of the last `seconds`. Raises `ServiceUnavailableError`, with the reason, on failure."""
    from dataplane.controller.metrics.history import decode_flow_report

    try:
        body = _fetch(host_port, config)
        report = decode_flow_report(body)
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        why = (
            f"GET {_PATH} from its HTTP port failed: {error}; pass the port that `tq serve --metrics` printed, the "
            "service's token if it has one (--token-file or TQ_TOKEN), and --tls-ca if the port has TLS"
        )
        raise ServiceUnavailableError(address=f"{host_port[0]}:{host_port[1]}", why=why) from error
    return _mean_rates(report, max(1, min(round(seconds), _LONGEST_MEAN_S)))  # the report has one value per second


def _fetch(host_port: tuple[str, int], config: DataPlaneConfig) -> bytes:
    """Return the body of the service's answer. OSError or HTTPException if there is none, or if its status is not
    200."""
    token = config.secret()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection = http.client.HTTPConnection(*host_port, timeout=_WAIT_S)
    connection.sock = _connect(host_port, config)  # instead of the connection's own socket, which has no TLS
    try:
        connection.request("GET", _PATH, headers=headers)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise OSError(f"the answer is {response.status} {response.reason}")
    return body


def _connect(host_port: tuple[str, int], config: DataPlaneConfig) -> socket.socket:
    """Connect to the HTTP port, with TLS if it is configured."""
    from dataplane.protocol.tls import client_context

    context = client_context(config)
    plain = socket.create_connection(host_port, timeout=_WAIT_S)
    if context is None:
        return plain
    try:
        return context.wrap_socket(plain, server_hostname=host_port[0])
    except BaseException:
        plain.close()
        raise


def _mean_rates(report: FlowReport, seconds: int) -> FlowRates:
    """Return the mean of the last `seconds` values of each series; `FlowReport` has them under the same names."""
    names = FlowRates.__dataclass_fields__
    return FlowRates(**{name: sum(getattr(report, name)[-seconds:]) / seconds for name in names})
