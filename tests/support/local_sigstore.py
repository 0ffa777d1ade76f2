"""A Sigstore of its own: certificate authority, certificate log and signature log, all in memory.

What it signs is verified by sigstore itself, against the trust root that `write_trust_root` writes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from datetime import UTC, datetime, timedelta
from pathlib import Path

import rfc8785
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

_STATEMENT_TYPE = "application/vnd.in-toto+json"
#: Extensions of Fulcio's certificates: issuer, source repository and its revision, build config.
_FULCIO = "1.3.6.1.4.1.57264.1."
_ISSUER, _REPOSITORY, _DIGEST, _REF, _BUILD_CONFIG = 8, 12, 13, 14, 18
_SCT_LIST = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(SHA256()))


def _utf8(text: str) -> bytes:
    """Encode a DER UTF8String of less than 128 bytes."""
    data = text.encode()
    return bytes([0x0C, len(data)]) + data


class LocalSigstore:
    """Signs statements about files as GitHub's workflows have them signed."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC).replace(microsecond=0)
        self._authority, self._certificate_log, self._signature_log = (
            ec.generate_private_key(ec.SECP256R1()) for _ in range(3)
        )
        self._root = self._make_root()

    def _builder(self, subject: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "local")]))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.now - timedelta(minutes=5))
            .not_valid_after(self.now + timedelta(minutes=5))
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._authority.public_key()),
                critical=False,
            )
        )

    def _make_root(self) -> x509.Certificate:
        key = self._authority.public_key()
        return (
            self._builder("local", key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(digital_signature=False, key_cert_sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .sign(self._authority, SHA256())
        )

    def write_trust_root(self, path: Path) -> Path:
        """Write `trusted_root.json`."""
        since = {"start": (self.now - timedelta(days=1)).isoformat().replace("+00:00", "Z")}

        def log(key: ec.EllipticCurvePrivateKey, name: str) -> dict[str, object]:
            return {
                "baseUrl": f"https://{name}.invalid",
                "hashAlgorithm": "SHA2_256",
                "publicKey": {
                    "rawBytes": _b64(_public(key)),
                    "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                    "validFor": since,
                },
                "logId": {"keyId": _b64(hashlib.sha256(_public(key)).digest())},
            }

        authority = {
            "subject": {"organization": "local", "commonName": "local"},
            "certChain": {
                "certificates": [{"rawBytes": _b64(self._root.public_bytes(Encoding.DER))}]
            },
            "validFor": since,
        }
        root = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log(self._signature_log, "rekor")],
            "certificateAuthorities": [authority],
            "ctlogs": [log(self._certificate_log, "ct")],
        }
        path.write_text(json.dumps(root))
        return path

    def attest(self, name: str, digest: str, repository: str, workflow: str) -> dict[str, object]:
        """Return a PEP 740 attestation: a workflow of a GitHub repository publishes a file."""
        statement = json.dumps(
            {
                "_type": "https://in-toto.io/Statement/v1",
                "subject": [{"name": name, "digest": {"sha256": digest}}],
                "predicateType": "https://docs.pypi.org/attestations/publish/v1",
                "predicate": None,
            }
        ).encode()
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certify(key.public_key(), repository, workflow)
        kind = _STATEMENT_TYPE.encode()
        signed = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(statement), statement)
        signature = _sign(key, signed)
        return {
            "version": 1,
            "verification_material": {
                "certificate": _b64(certificate.public_bytes(Encoding.DER)),
                "transparency_entries": [self._log(statement, signature, certificate)],
            },
            "envelope": {"statement": _b64(statement), "signature": _b64(signature)},
        }

    def _certify(
        self, key: ec.EllipticCurvePublicKey, repository: str, workflow: str
    ) -> x509.Certificate:
        home, ref = f"https://github.com/{repository}", "refs/tags/v1"
        claims = {
            _ISSUER: "https://token.actions.githubusercontent.com",
            _REPOSITORY: home,
            _DIGEST: "0" * 40,
            _REF: ref,
            _BUILD_CONFIG: f"{home}/.github/workflows/{workflow}@{ref}",
        }
        identity = x509.UniformResourceIdentifier(claims[_BUILD_CONFIG])
        builder = (
            self._builder("signer", key)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False
            )
            .add_extension(x509.SubjectAlternativeName([identity]), critical=False)
        )
        for number, claim in claims.items():
            oid = ObjectIdentifier(f"{_FULCIO}{number}")
            builder = builder.add_extension(
                x509.UnrecognizedExtension(oid, _utf8(claim)), critical=False
            )
        unlogged = builder.sign(self._authority, SHA256()).tbs_certificate_bytes
        scts = x509.UnrecognizedExtension(_SCT_LIST, self._timestamps(unlogged))
        return builder.add_extension(scts, critical=False).sign(self._authority, SHA256())

    def _timestamps(self, certificate: bytes) -> bytes:
        """Return the certificate log's promise (RFC 6962) for what a certificate says."""
        issuer = hashlib.sha256(_public(self._authority)).digest()
        time = int(self.now.timestamp() * 1000)
        entry = issuer + len(certificate).to_bytes(3, "big") + certificate
        signed = struct.pack("!BBQH", 0, 0, time, 1) + entry + struct.pack("!H", 0)
        signature = _sign(self._certificate_log, signed)
        log = hashlib.sha256(_public(self._certificate_log)).digest()
        promise = struct.pack("!B32sQHBBH", 0, log, time, 0, 4, 3, len(signature)) + signature
        one = struct.pack("!H", len(promise)) + promise
        data = struct.pack("!H", len(one)) + one
        length = bytes([len(data)]) if len(data) < 128 else bytes([0x81, len(data)])
        return b"\x04" + length + data

    def _log(
        self, statement: bytes, signature: bytes, certificate: x509.Certificate
    ) -> dict[str, object]:
        """Return the signature log's entry, the only one in it."""
        body = json.dumps(
            {
                "apiVersion": "0.0.1",
                "kind": "dsse",
                "spec": {
                    "envelopeHash": {"algorithm": "sha256", "value": "0" * 64},
                    "payloadHash": {
                        "algorithm": "sha256",
                        "value": hashlib.sha256(statement).hexdigest(),
                    },
                    "signatures": [
                        {
                            "signature": _b64(signature),
                            "verifier": _b64(certificate.public_bytes(Encoding.PEM)),
                        }
                    ],
                },
            }
        ).encode()
        log = hashlib.sha256(_public(self._signature_log)).digest()
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"rekor.invalid - 1\n1\n{_b64(root)}\n"
        signed = _b64(log[:4] + _sign(self._signature_log, note.encode()))
        time = int(self.now.timestamp())
        promise = rfc8785.dumps(
            {"body": _b64(body), "integratedTime": time, "logID": log.hex(), "logIndex": 0}
        )
        return {
            "logIndex": "0",
            "logId": {"keyId": _b64(log)},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(time),
            "inclusionPromise": {"signedEntryTimestamp": _b64(_sign(self._signature_log, promise))},
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": _b64(root),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": f"{note}\n\u2014 rekor.invalid {signed}\n"},
            },
            "canonicalizedBody": _b64(body),
        }


def _usage(*, digital_signature: bool, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
