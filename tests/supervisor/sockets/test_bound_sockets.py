"""A port is bound at every address of a host, of either family, except of a family that the kernel lacks."""

from __future__ import annotations

import errno
import socket

import pytest

from supervisor.sockets import bound_sockets

V4 = (socket.AF_INET, ("127.0.0.1", 0))
V6 = (socket.AF_INET6, ("::1", 0, 0, 0))


@pytest.fixture
def no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without IPv6, whose resolver returns IPv6 addresses all the same."""
    opened = socket.socket

    def unsupported(family: int = -1, *arguments: int, **named: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return opened(family, *arguments, **named)

    monkeypatch.setattr(socket, "socket", unsupported)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("host", ["", "localhost"])
async def test_a_host_with_several_addresses_has_a_listener_at_each(host: str, shared: bool) -> None:
    sockets = await bound_sockets.bound_sockets(0, host, shared=shared, backlog=8)
    assert len(sockets) == len({bound.family for bound in sockets}) >= 1
    for bound in sockets:
        bound.close()


def test_a_family_that_the_kernel_lacks_is_left_out(no_ipv6: None) -> None:
    (bound,) = bound_sockets.bind_all([V6, V4], 0, shared=True)
    assert bound.family == socket.AF_INET
    bound.close()
    with pytest.raises(OSError, match="family not supported"):
        bound_sockets.bind_all([V6], 0)


def test_a_host_without_addresses_cannot_be_bound() -> None:
    with pytest.raises(OSError, match="no address"):
        bound_sockets.bind_all([], 0)


def test_a_port_that_is_taken_at_one_address_leaves_nothing_bound_at_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            bound_sockets.bind_all([(socket.AF_INET, ("127.0.0.2", 0)), V4], port)
        (bound,) = bound_sockets.bind_all([(socket.AF_INET, ("127.0.0.2", 0))], port)
        bound.close()
