"""Attestations of wheels (PEP 740): who built a file that an index lists, signed through Sigstore.

A provenance file has the attestations of one wheel. One of them must be signed for the publisher
that the index names, and for exactly this file. sigstore checks the certificate, its transparency
logs and the signature.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.errors import ConfigError
from modulm.plugins.index import to_install

if TYPE_CHECKING:
    from sigstore.verify import Verifier

__all__ = ["check_attestation", "describe_publisher", "make_provenance"]

#: What checks attestations; `pypi_attestations` brings sigstore.
_LIBRARY, _EXTRA = "pypi_attestations", "modulm-command-plugins[attestations]"


def _require_library(what: str) -> None:
    if find_spec(_LIBRARY) is None:
        raise ConfigError("index", f"{what} needs pypi-attestations{to_install(_EXTRA)}")


def check_attestation(
    package: str,
    wheel: tuple[str, str],
    provenance: bytes,
    publisher: Mapping[str, str],
    trust_root: Path | None = None,
) -> str:
    """Check that `publisher` attests a wheel, and return the type of the attestation.

    package: for messages. wheel: its file name and SHA-256. provenance: a PEP 740 provenance
    object. trust_root: `trusted_root.json` of another Sigstore than the public one, whose own is
    updated over the network. Raises ConfigError.
    """
    _require_library(f"checking the attestation of {package}")
    from pydantic import ValidationError
    from pypi_attestations import AttestationError, Provenance
    from sigstore.errors import Error as SigstoreError

    try:
        bundles = Provenance.model_validate_json(provenance).attestation_bundles
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ConfigError("index", f"the provenance of {package} is invalid: {problem}") from error
    policy, verifier = _policy(package, publisher), _verifier(trust_root)
    reason = "it has none"
    for attestation in (one for bundle in bundles for one in bundle.attestations):
        try:
            kind, payload = verifier.verify_dsse(attestation.to_bundle(), policy)
            return _check_statement(kind, payload, wheel)
        except (AttestationError, SigstoreError, ValueError) as error:
            reason = " ".join(str(error).split())
    claimed = ", ".join(
        dict.fromkeys(describe_publisher(b.publisher.model_dump()) for b in bundles)
    )
    raise ConfigError(
        "index",
        f"no attestation of {package} by {describe_publisher(publisher)} is valid: {reason}"
        + (f" (its provenance names {claimed})" if claimed else ""),
    )


def _check_statement(kind: str, payload: bytes, wheel: tuple[str, str]) -> str:
    """Return the type of a signed statement about this wheel. Raises ValueError otherwise."""
    from packaging.utils import parse_wheel_filename
    from pypi_attestations import AttestationType

    name, digest = wheel
    if kind != "application/vnd.in-toto+json":
        raise ValueError(f"it signs {kind} instead of an in-toto statement")
    statement = json.loads(payload)
    subjects = statement.get("subject") or []
    if len(subjects) != 1:
        raise ValueError(f"it is of {len(subjects)} files")
    signed = str(subjects[0].get("name"))
    if parse_wheel_filename(signed) != parse_wheel_filename(name):
        raise ValueError(f"it is of {signed}, not of {name}")
    other = subjects[0].get("digest", {}).get("sha256")
    if other != digest:
        raise ValueError(f"it is of a file with the SHA-256 {other}, and {name} has {digest}")
    return AttestationType(statement.get("predicateType")).value


def _policy(package: str, publisher: Mapping[str, str]) -> Any:
    """Return the policy that a publisher's certificate must meet. Raises ConfigError."""
    from pydantic import TypeAdapter, ValidationError
    from pypi_attestations import Publisher

    try:
        return TypeAdapter(Publisher).validate_python(dict(publisher))._as_policy()
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ConfigError(
            "index", f"the publisher of {package} is invalid: {where}: {problem['msg']}"
        ) from error


@cache
def _verifier(trust_root: Path | None) -> Verifier:
    """Return what verifies with a Sigstore's keys. Raises ConfigError."""
    from sigstore.errors import Error as SigstoreError
    from sigstore.models import TrustedRoot
    from sigstore.verify import Verifier

    try:
        if trust_root is None:
            return Verifier.production()
        return Verifier(trusted_root=TrustedRoot.from_file(str(trust_root)))
    except (SigstoreError, OSError, ValueError) as error:
        where = trust_root or "the public Sigstore instance"
        raise ConfigError("trust_root", f"cannot read the keys of {where}: {error}") from error


def describe_publisher(publisher: Mapping[str, Any]) -> str:
    """Return "GitHub me/project publish.yml"."""
    names = (publisher[key] for key in publisher if key != "kind" and publisher[key])
    return " ".join([str(publisher.get("kind", "unknown")), *map(str, names)])


def make_provenance(attestations: list[bytes], publisher: Mapping[str, str]) -> bytes:
    """Return the provenance object of a wheel's `.publish.attestation` files. Checks formats only.

    Raises ConfigError.
    """
    _require_library("writing provenance files")
    from pydantic import ValidationError
    from pypi_attestations import Attestation, AttestationBundle, Provenance

    try:
        bundle = AttestationBundle(
            publisher=dict(publisher),
            attestations=[Attestation.model_validate_json(text) for text in attestations],
        )
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ConfigError("publisher", f"invalid at {where}: {problem['msg']}") from error
    return Provenance(attestation_bundles=[bundle]).model_dump_json(indent=1).encode() + b"\n"
