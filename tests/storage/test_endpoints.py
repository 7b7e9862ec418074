import os
import socket

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from dataplane.errors import ServiceUnavailableError
from dataplane.storage.endpoints import bind, candidates
from tests.ports import free_ports
from tests.storage.unit_under_test import WAIT_S

pytestmark = pytest.mark.integration

NOBODY = 65534


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


@pytest.fixture
def router(context):
    with context.socket(zmq.ROUTER) as made:
        yield made


def is_heard(context, router, endpoint):
    with context.socket(zmq.DEALER) as peer:
        peer.set(zmq.IPV6, 1)
        peer.connect(endpoint)
        peer.send(b"hello")
        return bool(router.poll(WAIT_S * 1000)) and router.recv_multipart()[1:] == [b"hello"]


def test_ipc_comes_before_tcp_and_both_answer(context, router):
    ipc, tcp = bind(router, "127.0.0.1", guarded=False)
    assert ipc.startswith("ipc://@")
    assert tcp.startswith("tcp://127.0.0.1:")
    assert is_heard(context, router, ipc)
    assert is_heard(context, router, tcp)


def test_without_a_tcp_host_there_is_ipc_only(router):
    assert len(bind(router, None, guarded=False)) == 1


def test_names_are_resolved_and_another_may_be_told(context, router):
    _, tcp = bind(router, "localhost", guarded=False)
    assert is_heard(context, router, tcp)
    with context.socket(zmq.ROUTER) as other:
        assert bind(other, "127.0.0.1", advertise_host="node-7", guarded=False)[1].startswith("tcp://node-7:")


def test_a_port_is_had_or_named(context, router):
    port = free_ports()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: the port is in use"),
    ):
        bind(router, "127.0.0.1", tcp_port=port, guarded=False)
    _, tcp = bind(router, "127.0.0.1", tcp_port=port, guarded=False)
    assert tcp == f"tcp://127.0.0.1:{port}"
    assert is_heard(context, router, tcp)


def test_ipv6(context, router):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    _, tcp = bind(router, "::1", guarded=False)
    assert tcp.startswith("tcp://[::1]:")
    assert is_heard(context, router, tcp)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
def test_beyond_loopback_only_if_guarded(router, host):
    with pytest.raises(ValueError, match="loopback"):
        bind(router, host, guarded=False)


def test_a_host_that_is_not_here_is_named(router):
    with pytest.raises(ServiceUnavailableError, match=r"192\.0\.2\.1"):
        bind(router, "192.0.2.1", guarded=True)


def test_another_user_is_turned_away_on_ipc(router):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    (ipc,) = bind(router, None, guarded=False)
    child = os.fork()
    if child == 0:
        os.setuid(NOBODY)
        peer = zmq.Context().socket(zmq.DEALER)
        events = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        peer.connect(ipc)
        turned_away = events.poll(WAIT_S * 1000) and recv_monitor_message(events)
        os._exit(0 if turned_away else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not router.poll(0)


def test_a_client_tries_what_it_can_reach(router):
    ipc, tcp = bind(router, "127.0.0.1", guarded=False)
    assert candidates((ipc, tcp), same_host=True) == [ipc, tcp]
    assert candidates((ipc, tcp), same_host=False) == [tcp]
    assert candidates(("ipc://@nobody", "ipc:///nobody/there", tcp), same_host=True) == [tcp]
