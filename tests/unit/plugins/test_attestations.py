"""Wheels of an index are checked against their attestations (PEP 740).

A Sigstore made here signs; sigstore and pypi-attestations verify.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from index_wheels import POINTS, wheel
from local_sigstore import LocalSigstore

from modulm.plugins import PluginManager
from modulm.plugins.manager import using
from modulm_command_plugins.command import command

PUBLISHER = {"kind": "GitHub", "repository": "me/longest", "workflow": "publish.yml"}


@pytest.fixture(scope="module")
def sigstore() -> LocalSigstore:
    return LocalSigstore()


@pytest.fixture
def folder(tmp_path: Path, sigstore: LocalSigstore) -> Path:
    """A wheel, and the trust root of the Sigstore that signs for it."""
    wheel(tmp_path, "modulm-longest", "1.0", POINTS)
    sigstore.write_trust_root(tmp_path / "trusted_root.json")
    return tmp_path


def run(*arguments: str) -> Result:
    with using(PluginManager()):
        return CliRunner().invoke(command, arguments)


def attest(folder: Path, sigstore: LocalSigstore, **changes: str) -> dict[str, Any]:
    """Write the attestation of the wheel, or of what `changes` say, beside it."""
    (path,) = folder.glob("*.whl")
    facts = {
        "name": path.name,
        "digest": hashlib.sha256(path.read_bytes()).hexdigest(),
        "repository": PUBLISHER["repository"],
        "workflow": PUBLISHER["workflow"],
    }
    attestation: dict[str, Any] = sigstore.attest(**facts | changes)
    path.with_name(f"{path.name}.publish.attestation").write_text(json.dumps(attestation))
    return attestation


def list_wheels(folder: Path, *options: str) -> Result:
    publisher = json.dumps(PUBLISHER)
    return run("index", str(folder), "--publisher", publisher, *options)


def install(folder: Path, *options: str, trust_root: str = "trusted_root.json") -> Result:
    sources = ("--index", str(folder / "index.json"), "--trust-root", str(folder / trust_root))
    return run("install", "modulm-longest", *sources, "--dry-run", *options)


def test_an_attested_wheel_is_installed_and_its_publisher_named(folder, sigstore) -> None:
    attest(folder, sigstore)
    assert list_wheels(folder, "--require-attestations").exit_code == 0
    index = json.loads((folder / "index.json").read_text())
    assert index["requires_attestations"] is True
    (entry,) = index["packages"]
    assert entry["publisher"] == PUBLISHER
    assert (folder / entry["provenance"]).exists()
    done = install(folder)
    assert done.exit_code == 0, done.exception
    assert (
        "modulm_longest-1.0-py3-none-any.whl is attested by GitHub me/longest publish.yml"
        in done.stdout
    )
    assert install(folder, "--require-attestations").exit_code == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digest": "0" * 64}, "it is of a file with the SHA-256 000"),
        ({"name": "modulm_longest-0.9-py3-none-any.whl"}, "it is of modulm_longest-0.9-"),
        ({"repository": "mallory/longest"}, "OIDCSourceRepositoryURI does not match"),
        ({"workflow": "other.yml"}, "does not match expected Trusted Publisher"),
    ],
)
def test_an_attestation_of_something_else_is_refused(folder, sigstore, changes, message) -> None:
    attest(folder, sigstore, **changes)
    list_wheels(folder)
    refusal = str(install(folder).exception)
    assert "no attestation of modulm-longest 1.0 by GitHub me/longest publish.yml" in refusal
    assert message in refusal


def test_an_altered_attestation_is_refused(folder, sigstore) -> None:
    attestation = attest(folder, sigstore)
    attestation["envelope"]["statement"] = attest(folder, sigstore, digest="1" * 64)["envelope"][
        "statement"
    ]
    (path,) = folder.glob("*.attestation")
    path.write_text(json.dumps(attestation))
    list_wheels(folder)
    assert "no attestation of modulm-longest 1.0" in str(install(folder).exception)


def test_signatures_of_another_sigstore_are_refused(folder, sigstore) -> None:
    attest(folder, sigstore)
    list_wheels(folder)
    LocalSigstore().write_trust_root(folder / "another.json")
    refusal = str(install(folder, trust_root="another.json").exception)
    assert "no attestation of modulm-longest 1.0" in refusal
    (folder / "empty.json").write_text("{}")
    refusal = str(install(folder, trust_root="empty.json").exception)
    assert f"trust_root: cannot read the keys of {folder / 'empty.json'}" in refusal


def test_a_wheel_without_the_attestation_that_is_required_is_refused(folder) -> None:
    list_wheels(folder, "--require-attestations")
    refusal = str(install(folder).exception)
    assert "modulm-longest 1.0 has no attestation" in refusal
    assert "requires one of each wheel" in refusal
    list_wheels(folder)
    assert install(folder).exit_code == 0
    assert "modulm-longest 1.0 has no attestation" in str(
        install(folder, "--require-attestations").exception
    )
    done = run("install", "modulm-server", "--require-attestations", "--dry-run")
    assert "installed by its name, without an attestation" in str(done.exception)
    path = str(folder / "modulm_longest-1.0-py3-none-any.whl")
    done = run("install", path, "--require-attestations", "--dry-run")
    assert "nothing says by whom it must be attested" in str(done.exception)


def test_faults_of_an_index_are_named(folder, sigstore) -> None:
    attest(folder, sigstore)
    done = run("index", str(folder), "--publisher", '{"kind": "GitHub"}')
    assert "publisher: invalid at publisher.GitHub.repository" in str(done.exception)
    assert "is no JSON" in str(run("index", str(folder), "--publisher", "me").exception)
    list_wheels(folder)
    path = folder / "index.json"
    index = json.loads(path.read_text())
    (entry,) = index["packages"]
    provenance = folder / entry["provenance"]
    provenance.write_text('{"version": 1}')
    assert "the provenance of modulm-longest 1.0 is invalid" in str(install(folder).exception)
    provenance.unlink()
    assert f"cannot read {provenance}" in str(install(folder).exception)
    entry.pop("publisher")
    path.write_text(json.dumps(index))
    assert "provenance and publisher belong together" in str(install(folder).exception)


def test_the_error_without_the_library_names_the_extra(folder, sigstore, monkeypatch) -> None:
    attest(folder, sigstore)
    list_wheels(folder)
    monkeypatch.setattr("modulm_command_plugins.attestations.find_spec", lambda name: None)
    assert (
        "checking the attestation of modulm-longest 1.0 needs pypi-attestations: "
        "pip install 'modulm-command-plugins[attestations]'"
    ) in str(install(folder).exception)
