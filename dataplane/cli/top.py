"""`tq top`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dataplane.cli.flags import Address, Json, TargetFlags
from dataplane.cli.formatting import ago, counted, duration, readable, shown
from dataplane.cli.output import console, print_json, table
from dataplane.cli.rates import Look, Rates, as_json, look, rates
from dataplane.cli.session import not_shown, session, waits_not_shown
from dataplane.cli.throughput import FlowRates, flow, where
from dataplane.config import DataPlaneConfig

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType

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
_SHORTEST_S, _LONGEST_S = 0.1, 86400
_WAIT_COLUMNS = ("waits", "for", "of partition", ">wants", ">ready", ">since", ">times out in")


def _interval(text: str) -> float:
    found = duration(text)
    if not _SHORTEST_S <= found <= _LONGEST_S:
        raise typer.BadParameter(f"{text} is not in the range {_SHORTEST_S} to {_LONGEST_S} seconds")
    return found


def top(
    *,
    address: Address = None,
    interval: Annotated[
        float, typer.Option("--interval", "-i", parser=_interval, metavar="SECONDS", help="Time between two updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval, then exit.")] = False,
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
    asked = None if http is None else _flow(http, config, interval)
    with session(config) as channel:
        frames = _looks(lambda: look(channel, asked), interval)
        try:
            _watch(config.address or "", frames, once=once, json=json)
        except KeyboardInterrupt:
            return 0
    return 0


def _flow(url: str, config: DataPlaneConfig, interval: float) -> Callable[[], FlowRates]:
    try:
        place = where(url, config.address or "")
    except ValueError:
        raise typer.BadParameter(f"{url!r} is not a URL, host:port or port", param_hint="--http") from None
    return lambda: flow(place, config, interval)


def _looks(look: Callable[[], Look], interval: float) -> Iterator[tuple[Look, Look]]:
    """Yield (previous snapshot, latest snapshot) forever."""
    before = look()
    while True:
        time.sleep(interval)  # the service has no notification for changes
        after = look()
        yield before, after
        before = after


def _watch(address: str, frames: Iterator[tuple[Look, Look]], *, once: bool, json: bool) -> None:
    screen = console()
    if not (once or json) and screen.is_terminal:
        _live(address, frames, screen)
        return
    for before, after in frames:
        if json:
            print_json(as_json(before, after))
        else:
            screen.print(frame(address, before, after))
        if once:
            return
        if not json:
            print(flush=True)


def _live(address: str, frames: Iterator[tuple[Look, Look]], screen: Console) -> None:
    from rich.live import Live

    with Live(f"connecting to {address} ...", console=screen, screen=True, auto_refresh=False) as live:
        for before, after in frames:
            live.update(frame(address, before, after, most_units=max(screen.height // 3, _LEAST_UNITS)), refresh=True)


def frame(address: str, before: Look, after: Look, *, most_units: int | None = None) -> Group:
    """Return the view after an interval. most_units: limit for the units shown, problematic and full ones first."""
    from rich.console import Group
    from rich.text import Text

    report, going = after.report, rates(before, after)
    parts: list[RenderableType] = [Text(_summary(address, after, going), style="bold")]
    parts += [] if after.flow is None else [Text(_through(after.flow), style="bold")]
    units = _foremost(report.units, most_units)
    parts += ["", table(_UNIT_COLUMNS, [_unit(unit) for unit in units])] if units else []
    left = len(report.units) - len(units)
    parts += [f"and {counted(left, 'more unit')}; `tq status` lists them"] if left else []
    partitions = [_partition(part, going[part.partition]) for part in report.partitions]
    parts += ["", table(_PARTITION_COLUMNS, partitions)] if partitions else []
    parts += [not_shown(report)] if not_shown(report) else []
    tasks = [_task(part, task) for part in report.partitions for task in part.tasks]
    parts += ["", table(_TASK_COLUMNS, tasks)] if tasks else []
    waits = [_wait(wait, after.waits.now) for wait in after.waits.waits]
    parts += ["", table(_WAIT_COLUMNS, waits)] if waits else []
    parts += [waits_not_shown(after.waits)] if waits_not_shown(after.waits) else []
    return Group(*parts)


def _foremost(units: Sequence[c.UnitStats], most: int | None) -> Sequence[c.UnitStats]:
    """Return at most `most` units in their original order, preferring units with problems, then the fullest."""
    if most is None or len(units) <= most:
        return units
    by_need = sorted(
        units, key=lambda unit: (unit.connected and not unit.problem, -unit.used_bytes / unit.capacity_bytes)
    )
    chosen = {unit.unit for unit in by_need[:most]}
    return [unit for unit in units if unit.unit in chosen]


def _summary(address: str, after: Look, going: dict[str, Rates]) -> str:
    report = after.report
    born = sum(rate.born or 0.0 for rate in going.values())
    used, capacity = (sum(getattr(unit, name) for unit in report.units) for name in ("used_bytes", "capacity_bytes"))
    return (
        f"{address}   {readable(used)} of {readable(capacity)} used   {born:,.1f} new samples/s   "
        f"{counted(len(report.sessions) - 1, 'client')}   {counted(after.waits.total, 'call')} waiting"
    )


def _through(flow: FlowRates) -> str:
    return (
        f"per second: {flow.puts:,.0f} samples put ({readable(flow.put_bytes)}), {flow.gets:,.0f} got "
        f"({readable(flow.get_bytes)}), {flow.claims:,.0f} claimed, {flow.clears:,.0f} cleared"
    )


def _unit(unit: c.UnitStats) -> tuple[object, ...]:
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


def _partition(part: c.PartitionStats, rate: Rates) -> tuple[object, ...]:
    notes = ["sealed"] if part.sealed else []
    notes += ["FILLING UP"] if part.pressed else []
    notes += [f"{counted(part.waiting_puts, 'put')} waiting"] if part.waiting_puts else []
    notes += [f"{part.evicted + part.evicted_unconsumed} evicted"] if part.evicted + part.evicted_unconsumed else []
    return (
        shown(part.partition),
        part.live,
        readable(part.live_bytes),
        part.born,
        "-" if part.num_samples is None else part.num_samples,
        _rate(rate.born),
        _rate(rate.dropped),
        "-" if rate.grown_bytes is None else readable(rate.grown_bytes),
        "-" if part.version is None else part.version,
        _warning(", ".join(notes)),
    )


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _task(part: c.PartitionStats, task: c.TaskStats) -> tuple[object, ...]:
    wants = ", ".join(map(shown, task.fields)) or "(has not claimed)"
    unset = part.version is None and task.stalest_version is not None
    lag = task.lag if task.lag is not None else "version not set" if unset else "-"
    names = shown(task.task), shown(part.partition)
    return *names, task.ready, task.leased, task.held, task.claimed, lag, task.waiting, wants


def _wait(wait: c.Wait, now: float) -> tuple[object, ...]:
    for_space = wait.task == ""
    what = "space" if for_space else f"task {shown(wait.task)}: {', '.join(map(shown, wait.fields)) or 'any sample'}"
    wanted, ready = (readable(wait.wanted), readable(wait.ready)) if for_space else (str(wait.wanted), str(wait.ready))
    times = ago(now - wait.since), ago(wait.until - now)
    return shown(wait.client), what, shown(wait.partition), wanted, ready, *times


def _warning(text: str) -> RenderableType:
    from rich.text import Text

    return Text(text, style="bold yellow")
