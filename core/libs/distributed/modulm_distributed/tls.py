"""TLS 1.3 between machines that share a secret, without certificates to manage.

The secret is the private key of a certificate authority. Each process signs its own certificate
with it and accepts only peers whose certificate was signed with the same key. So servers and
clients authenticate each other, and traffic is encrypted under keys of that connection alone.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

__all__ = ["Connection", "Readable", "TlsContexts", "TlsSession", "tls_contexts"]

#: Bytes to read at once.
_PIECE = 1 << 16
#: Maximum size of a TLS record in bytes.
_RECORD = 1 << 14
#: scrypt parameters n, r, p, and the memory they need (RFC 7914).
_SCRYPT = {"n": 1 << 14, "r": 8, "p": 1, "maxmem": 1 << 26}
_SALT = b"modulm certificate authority 1"
#: The order of P-256's group (FIPS 186-4, D.1.2.3).
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
#: Certificates live as long as their process, so clocks of machines may differ.
_FROM, _UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


@frozen(eq=False)
class TlsContexts:
    """The TLS contexts of a process, for accepting connections and for connecting."""

    server: ssl.SSLContext
    client: ssl.SSLContext

    def accept(self, peer: socket.socket) -> ssl.SSLSocket:
        """Create the server side of a connection. Raises OSError for unauthenticated peers."""
        return _wrapped(self.server, peer, server_side=True)

    def connect(self, peer: socket.socket) -> ssl.SSLSocket:
        """Create the client side of a connection. Raises OSError for unauthenticated peers."""
        return _wrapped(self.client, peer, server_side=False)


def _wrapped(context: ssl.SSLContext, peer: socket.socket, *, server_side: bool) -> ssl.SSLSocket:
    try:
        return context.wrap_socket(peer, server_side=server_side)
    except ssl.SSLError as error:
        raise _refusal(error) from error


def _refusal(error: ssl.SSLError) -> ConnectionRefusedError:
    return ConnectionRefusedError(f"the secrets differ ({error.reason})")


@lru_cache(maxsize=4)
def tls_contexts(secret: bytes) -> TlsContexts:
    """Create this process's contexts for peers that know `secret`."""
    from cryptography.hazmat.primitives.asymmetric import ec

    seed = hashlib.scrypt(secret, salt=_SALT, dklen=48, **_SCRYPT)
    scalar = int.from_bytes(seed, "big") % (_ORDER - 1) + 1
    authority_key = ec.derive_private_key(scalar, ec.SECP256R1())
    authority = _certificate(authority_key, authority_key, None)
    return TlsContexts(
        _context(ssl.PROTOCOL_TLS_SERVER, authority, authority_key),
        _context(ssl.PROTOCOL_TLS_CLIENT, authority, authority_key),
    )


def _context(kind: int, authority: Certificate, authority_key: object) -> ssl.SSLContext:
    """Create a context with a new certificate for one side."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID

    is_server = kind == ssl.PROTOCOL_TLS_SERVER
    usage = ExtendedKeyUsageOID.SERVER_AUTH if is_server else ExtendedKeyUsageOID.CLIENT_AUTH
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _certificate(key, authority_key, usage)
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the secret identifies peers, not their host
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority.public_bytes(Encoding.DER))
    if is_server:
        context.num_tickets = 0
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with NamedTemporaryFile(prefix="modulm-", suffix=".pem") as file:  # mode 0600
        file.write(private + certificate.public_bytes(Encoding.PEM))
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _certificate(key: object, signed_by: object, usage: object | None) -> Certificate:
    """Create a certificate for `key`. usage: the side that may use it; None for the authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    def name(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])

    issuer = name("modulm authority")
    public, issuing = key.public_key(), signed_by.public_key()  # type: ignore[attr-defined]
    is_authority = usage is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(issuer if is_authority else name("modulm"))
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(1 if is_authority else x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuing), False)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not is_authority,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=is_authority,
                crl_sign=False,
                encipher_only=False,
                decipher_only=False,
            ),
            True,
        )
    )
    if usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), False)  # type: ignore[list-item]
    return builder.sign(signed_by, hashes.SHA256())  # type: ignore[arg-type]


class TlsSession:
    """One side of a TLS connection, without its socket: bytes in, bytes out.

    It is thread-safe, but sealed data must be sent in the order in which it was sealed.
    """

    def __init__(self, contexts: TlsContexts, server: bool = False) -> None:
        self._received, self._sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = contexts.server if server else contexts.client
        self._tls = context.wrap_bio(self._received, self._sealed, server_side=server)
        self._lock = threading.Lock()

    def handshake(self, peer: socket.socket) -> None:
        """Authenticate both sides. Raises OSError unless the peer knows the secret."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(peer)
                piece = peer.recv(_PIECE)
                if not piece:
                    raise ConnectionRefusedError(
                        "the secrets differ, or the peer did not wait for the handshake"
                    ) from None
                self._received.write(piece)
            except ssl.SSLError as error:
                with suppress(OSError):  # the peer learns why
                    self._flush(peer)
                raise _refusal(error) from error
            else:
                self._flush(peer)
                return

    def _flush(self, peer: socket.socket) -> None:
        if data := self._sealed.read():
            peer.sendall(data)

    def seal(self, data: bytes) -> bytes:
        """Encrypt `data` for the peer."""
        with self._lock:
            self._tls.write(data)
            return self._sealed.read()

    def open(self, piece: bytes) -> bytes:
        """Decrypt a received piece; returns b"" while a record is incomplete.

        Call it once with b"" after the handshake, whose last piece may contain data. Raises OSError
        for data that the peer has not sealed.
        """
        with self._lock:
            received, tls = self._received, self._tls
            if piece:
                received.write(piece)
            opened = b""
            try:
                while received.pending or tls.pending():
                    data = tls.read(_RECORD)
                    if not data:
                        break
                    opened = opened + data if opened else data
            except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                pass  # a record is incomplete, or the peer has closed the session
            return opened


@frozen(eq=False)
class Connection:
    """A stream socket, with a TLS session if it leads to another machine."""

    socket: socket.socket
    session: TlsSession | None = None

    def seal(self, data: bytes) -> bytes:
        """Encrypt `data` if the connection has a session."""
        return data if self.session is None else self.session.seal(data)

    def reader(self) -> Readable:
        """Return the peer's data as a file."""
        if self.session is None:
            return self.socket.makefile("rb")
        return _SessionReader(self.socket, self.session)


class Readable(Protocol):
    """A file that is read to its end."""

    def read(self, size: int, /) -> bytes:
        """Read `size` bytes; fewer at the end. Raises OSError, ValueError."""

    def close(self) -> None:
        """Give up the file's part of the socket, which stays open until then."""


class _SessionReader:
    """Reads a peer's data in a session. Not thread-safe."""

    def __init__(self, peer: socket.socket, session: TlsSession) -> None:
        self._socket, self._session = peer, session
        self._opened, self._start = session.open(b""), 0

    def close(self) -> None:
        """See `Readable`: the socket has no other part."""

    def read(self, size: int, /) -> bytes:
        """See `Readable`."""
        end = self._start + size
        if end > len(self._opened):
            pieces = [self._opened[self._start :]]
            missing = size - len(pieces[0])
            while missing > 0:
                piece = self._socket.recv(_PIECE)
                if not piece:
                    break
                pieces.append(self._session.open(piece))
                missing -= len(pieces[-1])
            self._opened, self._start, end = b"".join(pieces), 0, size
        data = self._opened[self._start : end]
        self._start = end
        return data
