"""Addresses and ports."""

import socket

import pytest

from distributor.machine import network


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")


@pytest.mark.parametrize(
    ("address", "bound"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("203.0.113.9", "0.0.0.0"),  # reserved for documentation: nobody's (RFC 5737)
        pytest.param("::1", "::1", marks=ipv6),
        pytest.param("2001:db8::9", "::", marks=ipv6),  # likewise (RFC 3849)
    ],
)
def test_listen(address, bound):
    with network.listen(address) as listener:
        host, port = listener.getsockname()[:2]
        assert host == bound
        target = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
        with socket.create_connection((target, port), timeout=30):
            accepted, _ = listener.accept()
            accepted.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "203.0.113.9", pytest.param("::1", marks=ipv6)])
def test_nobody_takes_the_port_meanwhile(address):
    with network.listen(address) as listener:
        for option in (None, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            with socket.socket(listener.family) as second:
                if option is not None:
                    second.setsockopt(socket.SOL_SOCKET, option, 1)
                with pytest.raises(OSError, match="in use"):
                    second.bind(listener.getsockname())


def test_listeners_have_ports_of_their_own():
    listeners = [network.listen("127.0.0.1") for _ in range(4)]
    try:
        assert len({listener.getsockname()[1] for listener in listeners}) == 4
    finally:
        for listener in listeners:
            listener.close()


@pytest.mark.parametrize("loopback", ["127.0.0.1", pytest.param("::1", marks=ipv6)])
def test_loopback_is_reached_from_loopback(loopback):
    assert network.address_towards(loopback) == loopback


@pytest.fixture
def unknown_host(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return "no-such-host.invalid"


def test_an_unknown_host(unknown_host):
    assert network.address_towards(unknown_host) is None
    assert network.resolve(unknown_host) == unknown_host


@pytest.mark.parametrize("name", ["a" * 64, ".."])
def test_an_impossible_host_name(name):
    assert network.address_towards(name) is None
    assert network.resolve(name) == name


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_an_address_resolves_to_itself(address):
    assert network.resolve(address) == address


@pytest.mark.parametrize(
    ("own", "others", "routes", "expected"),
    [
        ("10.0.0.2", ["10.0.0.1", "10.0.0.2"], {"10.0.0.1": "eth1", "10.0.0.2": "lo"}, "eth1"),
        ("10.0.0.2", ["10.0.0.2"], {"10.0.0.2": "lo"}, "lo"),  # no other machine
        ("10.0.0.2", ["10.0.0.2", "10.0.0.2"], {"10.0.0.2": "lo"}, "lo"),
        ("10.0.0.2", ["10.0.0.1"], {}, None),
        ("10.0.0.2", ["10.0.0.1", "10.0.0.3"], {"10.0.0.3": "eth0"}, "eth0"),
    ],
)
def test_the_interface_towards_the_others(own, others, routes, expected):
    assert network.interface_towards(own, others, routes.get) == (expected, None)


def test_several_ways_are_worth_a_warning():
    routes = {"10.0.0.1": "eth0", "10.1.0.1": "eth1", "10.1.0.2": "eth1"}
    chosen, warning = network.interface_towards("10.0.0.2", list(routes), routes.get)
    assert chosen == "eth1"
    assert "eth0 to 10.0.0.1, eth1 to 10.1.0.1, eth1 to 10.1.0.2" in warning and "GLOO_SOCKET_IFNAME" in warning
    assert network.interface_towards("10.0.0.2", list(routes)[:2], routes.get)[0] == "eth0"  # of equals, the master's


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=ipv6)])
def test_the_kernels_route(address):
    assert network.interface_of_route(address) == "lo"


@pytest.mark.parametrize("address", ["no address", "host.invalid", ""])
def test_no_route(address):
    assert network.interface_of_route(address) is None


@pytest.mark.parametrize(
    ("executor", "driver", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("203.0.113.9", "127.0.0.1", "203.0.113.9"),  # outside a NAT: others see more than loopback
        ("localhost", "localhost", "127.0.0.1"),
        pytest.param("[::1]", "[::1]", "::1", marks=ipv6),
    ],
)
def test_the_address_of_a_node(executor, driver, expected):
    assert network.node_address(executor, driver) == expected


def test_an_own_address_wins(monkeypatch):
    monkeypatch.setattr(network, "is_own", lambda address: address in ("10.1.0.2", "127.0.1.1"))
    monkeypatch.setattr(network, "address_towards", lambda host: "10.0.0.2")
    assert network.node_address("10.1.0.2", "10.0.0.1") == "10.1.0.2"
    assert network.node_address("127.0.1.1", "10.0.0.1") == "10.0.0.2"  # what the host's own name means there
    assert network.node_address("198.51.100.7", "10.0.0.1") == "10.0.0.2"


@pytest.mark.parametrize("where", ["127.0.0.1", "127.0.0.2", "0.0.0.0"])
def test_a_reserved_port_is_for_a_server_that_reuses_addresses(where):
    with network.reserve("127.0.0.1") as holder, socket.socket() as other, socket.socket() as server:
        address = (where, holder.getsockname()[1])
        with pytest.raises(OSError):
            other.bind(address)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        socket.create_connection(address, 5.0).close()
