"""The driver's side of the channel: one thread with an event loop serves all nodes of a run."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import ssl
import tempfile
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol, TypeVar

from distributor.channel import frames
from distributor.channel.node import Endpoint

#: Seconds that a stranger may take to show the token.
_HELLO_TIMEOUT = 10.0

_TOKEN_BYTES = 32

T = TypeVar("T")


class Listener(Protocol):
    """What the channel tells; called in the channel's thread."""

    def on_log(self, log: frames.Log) -> None: ...

    def on_event(self, node: str, event: dict[str, Any]) -> None: ...

    def on_lost(self, node: str) -> None: ...


class ChannelServer:
    """Serves one run. Use as a context manager: leaving it ends every connection and the thread."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="distributor-channel", daemon=True)
        self._server: asyncio.Server | None = None
        self._nodes: dict[str, asyncio.StreamWriter] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._stop: dict[str, Any] | None = None

    def __enter__(self) -> ChannelServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def listen(self, bind: str, advertise: str) -> Endpoint:
        """Starts to listen for nodes on an ephemeral port.

        Args:
            bind: the address to bind; Spark's own for the driver, never all interfaces by default.
            advertise: the address that nodes are told.
        """
        context, certificate = _make_tls()
        self._call(self._listen(bind, context)).result()
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        return Endpoint(advertise, port, certificate, self._token)

    def attach(self, sock: socket.socket) -> None:
        """Serves a node over a connected socket whose other end it inherits; takes the socket over."""
        self._call(self._serve_socket(sock)).result()

    def stop(self, reason: str) -> None:
        """Orders all nodes to stop their ranks, those that connect later as well."""
        with suppress(RuntimeError):  # the run has just ended, and the loop with it
            self._loop.call_soon_threadsafe(self._order_stop, reason)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _listen(self, bind: str, context: ssl.SSLContext) -> None:
        self._server = await asyncio.start_server(
            self._accept, bind, 0, ssl=context, ssl_handshake_timeout=_HELLO_TIMEOUT, backlog=1024
        )

    async def _serve_socket(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        self._serving.add(asyncio.ensure_future(self._serve(reader, writer)))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            shown = await asyncio.wait_for(reader.readexactly(_TOKEN_BYTES), _HELLO_TIMEOUT)
            if hmac.compare_digest(shown, self._token):
                await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            pass
        finally:
            self._serving.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads one node's frames to their end."""
        node, said_bye = None, False
        try:
            while (message := await frames.read(reader)) is not None:
                if isinstance(message, frames.Log):
                    self._listener.on_log(message)
                elif message.get("event") == "hello":
                    node = str(message["node"])
                    self._nodes[node] = writer
                    self._listener.on_event(node, message)
                    if self._stop is not None:
                        writer.write(frames.pack(self._stop))
                elif message.get("event") == "bye":
                    said_bye = True
                    writer.write(frames.pack({"order": "bye"}))
                elif node is not None:
                    self._listener.on_event(node, message)
        except (OSError, frames.ProtocolError, KeyError, TypeError):  # not, or no longer, one of our nodes
            pass
        finally:
            writer.close()
            if node is not None:
                self._nodes.pop(node, None)
                if not said_bye:
                    self._listener.on_lost(node)

    def _order_stop(self, reason: str) -> None:
        if self._stop is None:
            self._stop = {"order": "stop", "reason": reason}
            for writer in self._nodes.values():
                writer.write(frames.pack(self._stop))

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def _make_tls() -> tuple[ssl.SSLContext, str]:
    """A server context with a key made for this run, and its certificate as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "distributor")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks of a cluster differ
        .not_valid_after(now + timedelta(days=365))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile(prefix="distributor-tls-") as file:  # ssl reads keys from files only; mode 0600
        file.write(certificate + private)
        file.flush()
        context.load_cert_chain(file.name)
    return context, certificate.decode()
