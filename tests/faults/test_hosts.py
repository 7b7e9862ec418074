"""A service on two hosts: who is near is preferred, what is far comes over the network, late, with losses, and after
the network was away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.hosts import Guest, Hosts, missing, wait_until

pytestmark = [pytest.mark.skipif(bool(missing()), reason=f"hosts of its own: {missing()}"), pytest.mark.slow]

LIMIT_S = 600.0
"""The cable may be cut for longer than sessions and calls last by default: a busy machine looks late, and TCP tries
again ever more rarely."""
SEEN = "[[u.name, u.host, u.live_bytes > 0, u.connected] for u in client.stats().units]"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(scope="module")
def clients(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> tuple[Guest, Guest]:
    """One on each host, of a service with its controller on the first, and a storage unit on each."""
    one, two = hosts.one, hosts.two
    made = one.guest(), two.guest()
    state = str(tmp_path_factory.mktemp("state") / "state")
    settings = ["--capacity", "64m", "--host"]
    lasting = ["--session-timeout", str(LIMIT_S)]
    served = one.python("-m", "dataplane", "serve", "--state-dir", state, *lasting, *settings, one.address).line()
    address = served.rpartition(" ")[2]
    more = ["--name", "second", "--reconnect", "600", *settings, two.address]
    assert "second" in two.python("-m", "dataplane", "unit", address, *more).line()
    for guest in made:
        guest.ready()
        guest.begin(f"None; client = connect({address!r}, reconnect_s=600.0, call_timeout_s={LIMIT_S})")
        guest.answer()
    return made


@pytest.fixture
def guests(hosts: Hosts, clients: tuple[Guest, Guest]) -> tuple[Guest, Guest]:
    """The clients, of a service without samples and over a sound cable."""
    hosts.cable()
    clients[0].do("client.clear_samples(None, 'p')")
    clients[0].do("client.register_partition('p', ['x'], None, ['train'])")
    return clients


def test_rows_stay_on_their_writer_s_host_and_are_read_from_the_other(
    hosts: Hosts, guests: tuple[Guest, Guest]
) -> None:
    one, two = guests
    assert two.do("put(client, list(range(10)))") == 10
    units = {name: (host, holds) for name, host, holds, _ in one.do(SEEN)}
    assert units.pop("second") == (hosts.two.boot_id, True)
    assert list(units.values()) == [(hosts.one.boot_id, False)]
    assert one.do("put(client, list(range(10, 20)))") == 10
    assert all(holds for _, _, holds, _ in one.do(SEEN))
    for guest in guests:
        assert guest.do("read(client, list(range(20)))") == list(range(20))
        mapped = guest.do(
            "[c.local for c in client._connections.get().session_state.connections._connections.values()]"
        )
        assert sorted(mapped) == [False, True], "its own host's arena is mapped, the other's is not"


def test_a_long_way_with_losses_changes_nothing_but_the_time(hosts: Hosts, guests: tuple[Guest, Guest]) -> None:
    one, two = guests
    hosts.cable(delay_s=0.01, loss=0.01)
    assert two.do("put(client, list(range(100)))") == 100
    assert one.do("put(client, list(range(100, 120)))") == 20
    assert one.do("read(client, list(range(120)))") == list(range(120))
    assert two.do("read(client, list(range(120)))") == list(range(120))
    taken = [name for guest in guests for name in guest.do("claim(client, 60)")]
    assert sorted(taken) == sorted(f"s{n}" for n in range(120))


def test_nothing_is_lost_while_the_hosts_are_apart(hosts: Hosts, guests: tuple[Guest, Guest]) -> None:
    one, two = guests
    assert two.do("put(client, list(range(10)))") == 10
    assert one.do("read(client, list(range(10)))") == list(range(10))
    hosts.cable(loss=1)
    two.begin("put(client, list(range(10, 20)))")
    assert one.do("put(client, list(range(20, 30)))") == 10, "who is with the controller goes on"
    silent = "any(s.state == 'silent' for s in client.stats().sessions)"
    wait_until(lambda: one.do(silent), "the other host's client is not heard")
    hosts.cable()
    assert two.answer() == 10, "its put waited"
    for guest in guests:
        assert guest.do("read(client, list(range(30)))") == list(range(30))
    taken = [name for guest in guests for name in guest.do("claim(client, 15)")]
    assert sorted(taken) == sorted(f"s{n}" for n in range(30))


def test_a_unit_is_drained_to_the_other_host(hosts: Hosts, guests: tuple[Guest, Guest]) -> None:
    one, two = guests
    assert two.do("put(client, list(range(50)))") == 50
    number = one.do("[u.unit for u in client.stats().units if u.name == 'second'][0]")
    hosts.cable(delay_s=0.005)
    assert one.do(f"client.drain({number}, 60).cells") == 50
    assert not any(holds for name, _, holds, _ in one.do(SEEN) if name == "second")
    for guest in guests:
        assert guest.do("read(client, list(range(50)))") == list(range(50))
    one.do(f"client.undrain({number})")
