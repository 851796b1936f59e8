"""Addresses and ports of a node. Standard library only: part of it runs inside Spark's Python workers."""

from __future__ import annotations

import socket
import ssl


def listen(address: str) -> socket.socket:
    """A listening TCP socket on a free port of an address.

    It is kept open from the moment its port is told to others until the rendezvous store takes over the descriptor,
    so nobody can take the port in between. An address that is not of this machine (behind NAT, in a container with a
    forwarded name) is replaced by all interfaces.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        try:
            listener.bind((address, 0))
        except OSError:
            listener.bind(("", 0))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def resolve(host: str) -> str:
    """The IP address of a host name; the name itself if it cannot be resolved here."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):  # UnicodeError: no name that DNS could hold
        return host


def address_towards(host: str) -> str | None:
    """The address of this machine from which it would talk to a host, by the kernel's own routing; sends nothing.

    ``None`` if there is no route or the host is unknown here.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return None


def is_loopback(address: str) -> bool:
    """Whether an address is of this machine alone.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    return address.startswith("127.") or address == "::1"


def pinned_tls(certificate: str) -> ssl.SSLContext:
    """A client's TLS context that accepts one certificate (PEM) and no other, whatever the address it is shown at."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate)
    return context
