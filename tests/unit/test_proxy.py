"""The proxy does what tests of faults rely on."""

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from tests.fixtures.eventually import eventually
from tests.fixtures.proxy import Proxy

ANSWERED = 0.2  # seconds in which an echo would be back long ago


class Echo(socketserver.BaseRequestHandler):
    heard: bytes = b""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            while data := self.request.recv(1000):
                Echo.heard += data
                self.request.sendall(data)


@pytest.fixture
def echo_port() -> Iterator[int]:
    Echo.heard = b""
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def proxy(echo_port: int) -> Iterator[Proxy]:
    with Proxy(echo_port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection((proxy.host, proxy.port), timeout=5) as client:
        yield client


def ask(client: socket.socket, text: bytes, timeout: float = 5) -> bytes:
    client.settimeout(timeout)
    client.sendall(text)
    return client.recv(1000)


def test_passes_both_ways_and_counts(proxy: Proxy, client: socket.socket) -> None:
    assert ask(client, b"hello") == b"hello"

    assert (proxy.connections, proxy.open_connections) == (1, 1)
    assert (proxy.bytes_sent, proxy.bytes_received) == (5, 5)


def test_a_close_goes_through(proxy: Proxy, client: socket.socket) -> None:
    ask(client, b"hello")

    client.close()

    eventually(lambda: proxy.open_connections == 0)


def test_delay_makes_a_round_trip_longer(proxy: Proxy, client: socket.socket) -> None:
    proxy.delay(0.1)

    start = time.monotonic()
    ask(client, b"hello")

    assert 0.1 <= time.monotonic() - start < 5


def test_hold_delivers_late(proxy: Proxy, client: socket.socket) -> None:
    ask(client, b"hello")
    proxy.hold()

    with pytest.raises(TimeoutError):
        ask(client, b"late", timeout=ANSWERED)
    assert Echo.heard == b"hello"
    proxy.pass_through()

    client.settimeout(5)
    assert client.recv(1000) == b"late"


def test_black_hole_swallows_without_a_reset(proxy: Proxy, client: socket.socket) -> None:
    ask(client, b"hello")
    proxy.black_hole()

    with pytest.raises(TimeoutError):
        ask(client, b"gone", timeout=ANSWERED)
    proxy.pass_through()

    # A stream with a hole in it is of no use to anybody.
    with pytest.raises(ConnectionResetError):
        client.recv(1000)
    assert Echo.heard == b"hello"


def test_black_hole_takes_new_connections_and_says_nothing(proxy: Proxy) -> None:
    proxy.black_hole()

    with socket.create_connection((proxy.host, proxy.port)) as newcomer:
        with pytest.raises(TimeoutError):
            ask(newcomer, b"hello", timeout=ANSWERED)
        assert Echo.heard == b""


def test_a_close_is_lost_in_a_black_hole(proxy: Proxy, client: socket.socket) -> None:
    ask(client, b"hello")
    proxy.black_hole()

    client.close()
    eventually(lambda: all(link.has_lost_bytes for link in proxy._links))

    assert proxy.open_connections == 1


def test_a_forgotten_connection_is_reset_at_its_next_request(
    proxy: Proxy, client: socket.socket
) -> None:
    ask(client, b"hello")
    proxy.forget()

    client.settimeout(ANSWERED)
    with pytest.raises(TimeoutError):
        client.recv(1000)
    with pytest.raises(ConnectionResetError):
        ask(client, b"gone")
    with socket.create_connection((proxy.host, proxy.port)) as newcomer:
        assert ask(newcomer, b"again") == b"again"
    assert Echo.heard == b"helloagain"


def test_a_swallowed_connection_is_silent_and_a_new_one_works(
    proxy: Proxy, client: socket.socket
) -> None:
    ask(client, b"hello")
    proxy.swallow()

    with pytest.raises(TimeoutError):
        ask(client, b"gone", timeout=ANSWERED)
    with socket.create_connection((proxy.host, proxy.port)) as newcomer:
        assert ask(newcomer, b"again") == b"again"
    assert Echo.heard == b"helloagain"


def test_cut_resets_and_refuses_until_healed(proxy: Proxy, client: socket.socket) -> None:
    ask(client, b"hello")
    proxy.cut()

    with pytest.raises(ConnectionResetError):
        client.recv(1000)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((proxy.host, proxy.port))
    proxy.pass_through()

    with socket.create_connection((proxy.host, proxy.port)) as again:
        assert ask(again, b"again") == b"again"


def test_drop_reply_lets_the_request_through_once(proxy: Proxy, client: socket.socket) -> None:
    ask(client, b"one,")
    proxy.drop_reply()

    with pytest.raises(ConnectionResetError):
        ask(client, b"two,")
    with socket.create_connection((proxy.host, proxy.port)) as again:
        assert ask(again, b"three") == b"three"

    assert Echo.heard == b"one,two,three"


def test_a_dead_target_is_a_reset(proxy: Proxy) -> None:
    with Proxy(1) as hopeless, socket.create_connection((hopeless.host, hopeless.port)) as client:
        with pytest.raises(ConnectionResetError):
            client.recv(1000)


def test_a_connection_that_arrives_when_it_closes_is_closed(echo_port: int) -> None:
    for _ in range(30):
        proxy = Proxy(echo_port)
        proxy.start()
        # Both are news to the loop in the same step, or nearly so.
        with socket.create_connection((proxy.host, proxy.port), timeout=5) as client:
            proxy.close()
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
