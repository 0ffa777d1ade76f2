"""What `make wheels` builds, installed by plain pip into an environment that has nothing of this
repository, as a person does who has no checkout. (Third-party packages are borrowed, so that the
suite downloads none; the kernels are those that set-up compiled. `make wheels` compiles them.)

`make test` builds five wheels, one for each kind of content; `make test-all` builds and installs
all of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from zipfile import ZipFile

import httpx
import pytest

import modulm

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("modulm_kernels_cpu") is None, reason="no kernels are built"),
]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


#: Folders of wheels that hold more than Python modules, and of the compiled kernels.
FIVE = (
    ".",
    "plugins/routes/chat_page",
    "plugins/parsers/qwen",
    "plugins/models/demo",
    "kernels/cpu",
)


@pytest.fixture(scope="module")
def wheels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not request.config.getoption("--everything"):
        pytest.skip("all wheels are built by make test-all")
    folder = tmp_path_factory.mktemp("wheels")
    run(sys.executable, ROOT / "tools/wheels.py", folder, "--kernels", "built", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def environment(
    wheels: Path,
    tmp_path_factory: pytest.TempPathFactory,
    fresh_environment: Callable[[Path, bool], Path],
) -> Path:
    place = fresh_environment(tmp_path_factory.mktemp("fresh"), True)
    # A stranger's package of a name of ours and a higher version must not be taken.
    stranger = place / "modulm_server-9.9-py3-none-any.whl"
    with ZipFile(stranger, "w") as archive:
        info = "modulm_server-9.9.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: modulm-server\nVersion: 9.9\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    run(place / "venv/bin/python", "-m", "pip", "install", "--quiet", "--find-links", place,
        "--no-index", "--no-deps", "--require-hashes", "--find-links", wheels,
        "-r", wheels / "modulm.txt", cwd=place)  # fmt: skip
    return place


def test_lists_beside_the_wheels_name_everything(wheels: Path) -> None:
    own = (wheels / "modulm.txt").read_text().splitlines()
    assert all(
        re.fullmatch(r"modulm[\w.-]*==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in own
    )
    others = (wheels / "third-party.txt").read_text()
    assert "torch" in others
    assert "modulm" not in others
    document = json.loads((wheels / "sbom.cdx.json").read_text())
    names = [part["name"] for part in document["components"]]
    assert len(names) == len(set(names)) > len(own)


def test_a_wheel_of_each_distribution(wheels: Path) -> None:
    projects = [ROOT / "pyproject.toml"]
    for pattern in ("core/*/*", "kernels/*", "plugins/*/*"):
        projects += ROOT.glob(f"{pattern}/pyproject.toml")
    names = [path.name.split("-") for path in wheels.glob("*.whl")]
    assert len(names) == len(projects)
    assert {version for _, version, *_ in names} == {modulm.__version__}


def test_wheels_hold_what_is_no_python(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        import wheels
        for folder in sys.argv[2:]:
            path = wheels.ROOT / folder
            out = Path(sys.argv[1])
            wheels.pack_kernels(out) if path == wheels.COMPILED else wheels.build(path, out)
    """
    run(sys.executable, "-c", dedent(code), tmp_path, *FIVE, cwd=ROOT / "tools")

    def names(start: str) -> set[str]:
        (wheel,) = tmp_path.glob(f"{start}-*.whl")
        return {Path(name).name for name in ZipFile(wheel).namelist()}

    assert {"index.txt", "known_flags.toml", "py.typed", "LICENSE"} <= names("modulm")
    assert "chat.html" in names("modulm_route_chat_page")
    assert {"fits.toml", "modulm.toml"} <= names("modulm_parser_qwen")
    assert "modulm.toml" in names("modulm_kernels_cpu")
    assert "model.safetensors" in names("modulm_demo")
    assert "libmodulm_cpu_scalar.so" in names("modulm_kernels_cpu")


def test_nothing_comes_from_this_repository(environment: Path) -> None:
    told = "import json, modulm_server, modulm, modulm_kernels_cpu as k, modulm_qwen as q; print("
    told += "json.dumps([m.__file__ for m in (modulm_server, modulm, k, q)]))"
    homes = json.loads(run(environment / "venv/bin/python", "-c", told, cwd=environment))
    assert all(home.startswith(str(environment)) for home in homes), homes


def test_it_serves(environment: Path, serve: Callable[..., AbstractContextManager[str]]) -> None:
    log = environment / "server.log"
    with serve(environment / "venv/bin/modulm", log) as url:
        question = {"role": "user", "content": "What is the capital of France?"}
        body = {"model": "demo", "messages": [question], "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
        page = httpx.get(url, headers={"accept": "text/html"})
        version = httpx.get(f"{url}/version").json()
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    assert "<html" in page.text
    assert version["version"] == modulm.__version__
