"""TLS keys and certificates of one run."""

from __future__ import annotations

import secrets
import ssl
import tempfile
from datetime import UTC, datetime, timedelta

from distributor.values.checkpoints import PeerKey

TOKEN_BYTES = 32  # bytes of the secret that a client shows to a server of the run


def make_tls() -> tuple[ssl.SSLContext, str]:
    """Return a server context with a new key, and its certificate as PEM."""
    certificate, private = _make_key()
    return server_context(certificate, private), certificate


def make_peer_key() -> PeerKey:
    """Return a new key by which the nodes of a run recognize each other."""
    return PeerKey(*_make_key(), secrets.token_bytes(TOKEN_BYTES))


def server_context(certificate: str, private: str) -> ssl.SSLContext:
    """Return a server context for a certificate and its private key, both as PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no client resumes a session
    with tempfile.NamedTemporaryFile(prefix="distributor-tls-") as file:  # ssl reads keys from files only; mode 0600
        file.write((certificate + private).encode())
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _make_key() -> tuple[str, str]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "distributor")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # the clocks of machines may differ
        .not_valid_after(now + timedelta(days=365))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.decode(), private.decode()
