"""Addresses and ports of a node."""

from __future__ import annotations

import fcntl
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence

#: Netlink's constants: rtnetlink(7), linux/rtnetlink.h.
_RTM_NEWROUTE, _RTM_GETROUTE = 24, 26
_NLM_F_REQUEST = 1
_RTA_DST, _RTA_OIF = 1, 4
_NETLINK_TIMEOUT = 5.0

_ATTEMPT, _POLL = 1.0, 0.05  # seconds for an attempt to connect to a server that may not be up, and between two

_SIOCGIFADDR = 0x8915  # asks for an interface's IPv4 address, netdevice(7)


def listen(address: str) -> socket.socket:
    """Return a TCP socket that listens on a free port of an address.

    A socket for torch's rendezvous store stays open until the store takes over its descriptor, so no other process can
    take the port after other nodes have learned it.
    """
    listener = socket.socket(family_of(address))
    try:
        _bind(listener, address)
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def reserve(address: str) -> socket.socket:
    """Return a socket that reserves a free port on all interfaces for a server that is started later.

    A server may listen on another address than ``address``, which only tells IPv4 from IPv6: Ray never uses loopback.
    The kernel gives the port to no program that asks for a free one. The server can still listen on it if it sets
    SO_REUSEADDR, as most do, since the reserving socket is bound but does not listen (socket(7)).
    """
    holder = socket.socket(family_of(address))
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("::" if ":" in address else "", 0))
    except BaseException:
        holder.close()
        raise
    return holder


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of an IP address.

    >>> family_of("fd00::1").name, family_of("10.0.0.1").name
    ('AF_INET6', 'AF_INET')
    """
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def connect_once_up(server: tuple[str, int]) -> socket.socket:
    """Return a connection to a server that another node is about to start. Wait for it without a time limit."""
    while True:
        try:
            connection = socket.create_connection(server, timeout=_ATTEMPT)
        except OSError:
            time.sleep(_POLL)
        else:
            connection.settimeout(None)
            return connection


def _bind(sock: socket.socket, address: str) -> None:
    """Bind a socket to a free port of an address, or of all interfaces if it is not this machine's, as behind NAT."""
    try:
        sock.bind((address, 0))
    except OSError:
        sock.bind(("", 0))


def resolve(host: str) -> str:
    """Return the IP address of a host name, or the name itself if it cannot be resolved here."""
    return resolve_all(host)[0]


def resolve_all(host: str) -> list[str]:
    """Return all IP addresses of a host name, or the name itself if it cannot be resolved here."""
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):  # UnicodeError: not a valid DNS name
        return [host]


def address_towards(host: str) -> str | None:
    """Return this machine's own address for connections to a host, by the kernel's routes. Nothing is sent."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return None


def node_address(executor_host: str, driver_host: str) -> str:
    """Return the address at which other nodes should reach this machine.

    It is Spark's, at which executors fetch data from each other, if that belongs to this machine. If it does not, as
    outside a NAT, or resolves to loopback here, it is the local address for connections to the driver. If that is
    unknown, or is loopback while Spark's is not, it is Spark's.
    """
    towards = address_towards(driver_host.strip("[]"))
    known = resolve_all(executor_host.strip("[]"))
    known.sort(key=lambda address: (":" in address) != (":" in (towards or "")))  # the driver's address family first
    address = next((one for one in known if is_own(one) and not is_loopback(one)), None)
    if address is not None:
        return address
    address = known[0]
    return address if towards is None or (is_loopback(towards) and not is_loopback(address)) else towards


def is_own(address: str) -> bool:
    """Return whether an IP address belongs to this machine.

    >>> is_own("127.0.0.1"), is_own("203.0.113.9"), is_own("no address")
    (True, False, False)
    """
    try:
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    except OSError:
        return False


def interface_towards(
    here: str, others: Sequence[str], route: Callable[[str], str | None] | None = None
) -> tuple[str | None, str | None]:
    """Return the interface over which a node talks to the others, and a warning if several are needed.

    >>> interface_towards("10.0.0.2", ["10.0.0.1", "10.0.0.2"], {"10.0.0.1": "eth1", "10.0.0.2": "lo"}.get)
    ('eth1', None)
    """
    route = route or interface_of_route
    distant = [address for address in dict.fromkeys(others) if address != here]
    by_address = {address: name for address in distant or [here] if (name := route(address)) is not None}
    counts = Counter(by_address.values())
    if not counts:
        return None, None
    chosen = counts.most_common(1)[0][0]  # if several are equally common, the first one
    if len(counts) == 1:
        return chosen, None
    ways = ", ".join(f"{name} to {address}" for address, name in by_address.items())
    return chosen, (
        f"reaches the other nodes over several interfaces ({ways}), but gloo uses only one: {chosen}. If the run "
        "hangs, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in env= to an interface that joins all nodes"
    )


def interface_of_route(address: str) -> str | None:
    """Return the interface over which the kernel would send to an IP address, asked as by ``ip route get``.

    None also if the interface has no address of its own, which gloo needs. Source: rtnetlink(7), RTM_GETROUTE.
    """
    family = family_of(address)
    try:
        target = socket.inet_pton(family, address.partition("%")[0])
        request = struct.pack("=BBBBBBBBI", family, len(target) * 8, 0, 0, 0, 0, 0, 0, 0)
        request += struct.pack("=HH", 4 + len(target), _RTA_DST) + target
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as line:  # 0: NETLINK_ROUTE
            line.settimeout(_NETLINK_TIMEOUT)
            line.send(struct.pack("=IHHII", 16 + len(request), _RTM_GETROUTE, _NLM_F_REQUEST, 1, 0) + request)
            answer = line.recv(1 << 16)
        size, kind = struct.unpack_from("=IH", answer)
        at = 16 + 12  # after the netlink and route headers come attributes, aligned to 4 bytes
        while kind == _RTM_NEWROUTE and at + 4 <= size:
            length, attribute = struct.unpack_from("=HH", answer, at)
            if attribute == _RTA_OIF:
                name = socket.if_indextoname(*struct.unpack_from("=I", answer, at + 4))
                return name if _has_address(name, family) else None
            at += max(4, (length + 3) & ~3)
    except (OSError, AttributeError, struct.error):  # AttributeError: a platform without netlink
        pass
    return None


def _has_address(interface: str, family: int) -> bool:
    """Return whether an interface has an IPv4 address or, for ``AF_INET6``, an IPv6 address that is not link-local."""
    if family == socket.AF_INET6:
        with open("/proc/net/if_inet6") as table:  # address, index, prefix length, scope, flags, name
            return any(fields[5] == interface and fields[3] != "20" for fields in map(str.split, table))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return False
    return True


def has_ipv4(interface: str) -> bool:
    """Return whether an interface has an IPv4 address."""
    return _has_address(interface, socket.AF_INET)


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    return address.startswith("127.") or address == "::1"


def pinned_tls(certificate: str) -> ssl.SSLContext:
    """Return a client's TLS context that accepts only servers with the given certificate (PEM), at any address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate)
    return context
