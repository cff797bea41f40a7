import socket
from collections.abc import Iterator

import pytest

from kvota.edge.listening import bind
from kvota.edge.liveness import GONE_AFTER_S, gone_after_s, notice_vanished
from kvota.edge.settings import EdgeSettings
from tests.support.vanishing import on_linux, vanish

PATIENCE_S = 60.0
pytestmark = on_linux


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection over TCP: the one that stays has little patience."""
    with socket.socket() as listening:
        notice_vanished(listening, gone_after_s=1.0)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with socket.create_connection(listening.getsockname()) as far:
            near, _ = listening.accept()
            with near:
                near.settimeout(PATIENCE_S)
                yield near, far


@pytest.mark.parametrize("sent", [b"", b"unacknowledged"])
def test_a_peer_that_vanishes_is_noticed_whether_or_not_anything_is_sent(
    pair: tuple[socket.socket, socket.socket], sent: bytes
) -> None:
    near, far = pair
    vanish(far)
    near.sendall(sent)
    with pytest.raises(TimeoutError, match="timed out") as cut:
        near.recv(1)
    assert cut.value.errno is not None, "the kernel says so, not our own patience"


def test_a_peer_that_is_silent_but_there_stays(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    near.settimeout(3.0)
    with pytest.raises(TimeoutError) as waited:
        near.recv(1)
    assert waited.value.errno is None
    far.sendall(b"x")
    assert near.recv(1) == b"x"


def test_every_connection_of_a_server_is_told_to_notice() -> None:
    with bind("127.0.0.1", 0) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
            with accepted:
                user_timeout_ms = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                assert user_timeout_ms == 1000 * GONE_AFTER_S
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_slow_reader_is_told_apart_from_one_that_is_gone() -> None:
    """Who takes nothing is cut by us, with an outcome of its own, before the kernel does it."""
    for send_timeout_s in (0.5, EdgeSettings().send_timeout_s, 600.0):
        assert GONE_AFTER_S <= gone_after_s(send_timeout_s) > send_timeout_s
