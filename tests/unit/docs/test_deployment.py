"""The files of deploy/ are what they should be: their flags are ours, their metrics are there, and
whatever checks such files, where it is installed, finds nothing wrong with them."""

from __future__ import annotations

import configparser
import importlib.util
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import click
import crossplane
import kubernetes_validate
import promql_parser
import pytest
import yaml

from modulm.cli.main import cli
from modulm.config.schema.catalog import catalog
from modulm.errors import ConfigError
from modulm_executor_ray.executor import hosts_of

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
IMAGES = ("Dockerfile", "Dockerfile.cuda")
PAGE = ROOT / "docs/deployment.md"


def program(name: str) -> str | None:
    """Where a program is, in this environment or on this machine."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(program(name) is None, reason=f"no {name} here")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def parsed(arguments: list[str]) -> Any:
    """The configuration of a `modulm serve` command; fails as the command would."""
    assert arguments[:2] == ["modulm", "serve"], arguments
    command = cli.get_command(click.Context(cli), "serve")
    assert command is not None
    return command.make_context("serve", arguments[2:]).params["draft"].config


@pytest.fixture(scope="module")
def reference() -> Any:
    spec = importlib.util.spec_from_file_location("tool_reference", ROOT / "tools/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with a file of keys and what else units name."""
    (tmp_path / "keys").write_text("a-key-of-sixteen-letters\n")
    return tmp_path


# Container files


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, the rest) of a container file, lines that go on joined."""
    lines = [
        line
        for line in (DEPLOY / name).read_text().splitlines()
        if not line.startswith("#") and line.strip()
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (first, rest) for first, _, rest in (line.partition(" ") for line in joined.split("\n"))
    ]


@pytest.mark.parametrize("name", IMAGES)
@needs("hadolint")
def test_container_files_are_linted(name: str) -> None:
    assert run(str(program("hadolint")), "--failure-threshold", "style", DEPLOY / name) == ""


@needs("hadolint")
def test_the_linter_finds_something(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN apt-get install curl\n")
    with pytest.raises(AssertionError, match="DL3006"):
        run(str(program("hadolint")), tmp_path / "Dockerfile")


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_runs_serve_as_nobody_special(name: str, keys: Path) -> None:
    last = dict(instructions(name))
    assert last["USER"] == "10001"
    command = json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])
    assert parsed(command).model.model == "demo"
    flags = re.findall(r"\bMODULM_(\w+)=", last["ENV"])
    assert flags == ["HOST"]
    assert {flag.lower() for flag in flags} <= set(catalog().specs)
    assert "/health" in last["HEALTHCHECK"]


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_made_of_what_is_there(name: str) -> None:
    text = (DEPLOY / name).read_text()
    extras = run(sys.executable, "-c", _EXTRAS)
    assert '--extras "${EXTRAS}"' in text
    # Own packages come from their wheels alone, by hash; others' lists name none of them.
    assert "--no-index --no-deps --require-hashes" in text
    assert text.count("--find-links") == 1
    # Others' packages by hash, too, where the extra is locked; in the GPU image also torch.
    assert "--require-hashes \\\n        -r /wheels/locks/third-party.txt" in text
    if name.endswith("cuda"):
        assert "--require-hashes \\\n        -r tools/locks/torch.txt" in text
    (default,) = re.findall(r"^ARG EXTRAS=([\w-]+)$", text, re.M)
    assert default in extras.split()
    (options,) = re.findall(r"tools/wheels\.py /wheels(.*)\\$", text, re.M)
    help_text = run(sys.executable, ROOT / "tools/wheels.py", "--help")
    assert all(option in help_text for option in re.findall(r"--[\w-]+|built|none", options))


_EXTRAS = (
    "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project'];"
    " print(*p['optional-dependencies'])"
)


def test_the_build_sees_what_wheels_are_made_of() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    seen = {line[1:] for line in lines if line.startswith("!")}
    assert lines[1] == "*"
    assert {"core", "kernels", "plugins", "pyproject.toml", "tools", "LICENSE"} <= seen
    assert "constraints.txt" in seen
    assert all((ROOT / name).exists() for name in seen)


def builder() -> list[str] | None:
    """A builder of containers that works here and has the base image already."""
    base = "python:3.12-slim-bookworm"
    for name, known in (
        ("buildah", ["images", "--quiet", base]),
        ("podman", ["image", "inspect", base]),
        ("docker", ["image", "inspect", base]),
    ):
        if path := shutil.which(name):
            probe = subprocess.run([path, *known], capture_output=True, check=False, timeout=300)
            if probe.returncode == 0 and probe.stdout.strip():
                return [path, "build"]
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_container_files_are_built(name: str) -> None:
    build = builder()
    if build is None:
        pytest.skip("no builder of containers here that has the base image")
    run(*build, "--file", DEPLOY / name, "--tag", "modulm-test", ROOT)


# Compose, Kubernetes


def test_compose(keys: Path) -> None:
    document = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    server = document["services"]["modulm"]
    arguments = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in server["command"]]
    assert parsed(["modulm", "serve", *arguments]).model.model == "demo"
    build = server["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    flags = [name for name in server["environment"] if name.startswith("MODULM_")]
    assert flags == ["MODULM_API_KEY_FILE"]
    for service in document["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            here = (DEPLOY / source).is_file() if source.startswith(".") else None
            assert here or source in document["volumes"], volume
    assert set(server["secrets"]) == set(document["secrets"])


def manifests() -> dict[str, Any]:
    files = (DEPLOY / "kubernetes").glob("*.yaml")
    every = (each for file in files for each in yaml.safe_load_all(file.read_text()))
    return {each["kind"]: each for each in every}


def test_kubernetes(reference: Any) -> None:
    by_kind = manifests()
    assert set(by_kind) == {"PersistentVolumeClaim", "Deployment", "Service"}
    pod = by_kind["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    config = parsed(["modulm", "serve", *container["args"]])
    assert pod["spec"]["terminationGracePeriodSeconds"] > 30
    assert config.cache.kv_cache_memory_bytes < 12 << 30
    labels = pod["metadata"]["labels"]
    assert by_kind["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert by_kind["Service"]["spec"]["selector"] == labels
    paths = reference.described()["paths"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        request = container[probe]["httpGet"]
        assert request["path"] in paths
        assert request["port"] == container["ports"][0]["name"]
    assert pod["metadata"]["annotations"]["prometheus.io/path"] in paths
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"]
              if "persistentVolumeClaim" in v]  # fmt: skip
    assert claims == [by_kind["PersistentVolumeClaim"]["metadata"]["name"]]


def test_kubernetes_schemas() -> None:
    for manifest in manifests().values():
        kubernetes_validate.validate(manifest, "1.31", strict=True)


# Ray


def ray_applications(text: str, keys: Path) -> Any:
    """The applications of a configuration of Ray Serve, each built as Ray Serve builds it."""
    from ray.serve import schema
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as build
    from ray.serve._private.utils import import_attr

    text = text.replace("/etc/modulm/keys", str(keys / "keys"))
    checked = schema.ServeDeploySchema.model_validate(yaml.safe_load(text))
    return checked, [
        build(import_attr(each.import_path), each.args) for each in checked.applications
    ]


def ray_options(application: Any) -> dict[str, Any]:
    """The deployments of an application by name."""
    front = application._bound_deployment
    below = [bound._bound_deployment for bound in front.init_args[1:]]
    return {each.name: each for each in (front, *below)}


def test_ray_serve(keys: Path) -> None:
    checked, (application,) = ray_applications((DEPLOY / "ray/serve.yaml").read_text(), keys)
    applications = ray_options(application)
    assert set(applications) == {"front", "qwen", "demo"}
    scales = applications["qwen"]._deployment_config.autoscaling_config
    assert (scales.min_replicas, scales.max_replicas) == (1, 4)
    assert scales.target_ongoing_requests == 24
    assert checked.http_options.port == catalog().specs["port"].default


def test_ray_service(keys: Path, reference: Any) -> None:
    service = yaml.safe_load((DEPLOY / "ray/rayservice.yaml").read_text())
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    checked, (application,) = ray_applications(service["spec"]["serveConfigV2"], keys)
    replica = ray_options(application)["qwen"]
    cluster = service["spec"]["rayClusterConfig"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in pins
    (workers,) = cluster["workerGroupSpecs"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], workers)]
    for pod in pods:
        (container,) = pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["serve"] == checked.http_options.port
        for probe in ("livenessProbe", "readinessProbe"):
            port = container[probe]["httpGet"]["port"]
            assert isinstance(port, int) or port in ports
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
    limits = pods[1]["containers"][0]["resources"]["limits"]
    assert int(limits["cpu"]) >= replica.ray_actor_options["num_cpus"]
    patience = replica._deployment_config.graceful_shutdown_timeout_s
    assert pods[1]["terminationGracePeriodSeconds"] > patience
    assert workers["maxReplicas"] == replica._deployment_config.autoscaling_config.max_replicas


#: Fields of KubeRay's custom resources, ray.io/v1 (its API reference).
KUBERAY = {
    "service": {
        "serveService", "upgradeStrategy", "serveConfigV2", "rayClusterConfig",
        "excludeHeadPodFromServeSvc", "rayClusterDeletionDelaySeconds", "suspend", "managedBy",
        "serviceUnhealthySecondThreshold", "deploymentUnhealthySecondThreshold",
    },
    "cluster": {
        "suspend", "managedBy", "autoscalerOptions", "headServiceAnnotations", "upgradeStrategy",
        "enableInTreeAutoscaling", "gcsFaultToleranceOptions", "headGroupSpec", "rayVersion",
        "workerGroupSpecs", "authOptions",
    },
    "head": {
        "template", "headService", "enableIngress", "rayStartParams", "serviceType", "resources",
        "labels",
    },
    "workers": {
        "suspend", "groupName", "replicas", "minReplicas", "maxReplicas", "idleTimeoutSeconds",
        "rayStartParams", "template", "scaleStrategy", "numOfHosts", "resources", "labels",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["rayservice", "tpu"])
def test_ray_clusters_have_published_fields(name: str) -> None:
    service = yaml.safe_load((DEPLOY / f"ray/{name}.yaml").read_text())
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert service["spec"].keys() <= KUBERAY["service"]
    assert cluster.keys() <= KUBERAY["cluster"]
    assert head.keys() <= KUBERAY["head"]
    for group in (head, *workers):
        assert group is head or group.keys() <= KUBERAY["workers"]
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        pod["metadata"]["name"] = "x"
        kubernetes_validate.validate(pod, "1.31", strict=True)


def test_a_tpu_slice_has_the_chips_of_its_model(keys: Path) -> None:
    service = yaml.safe_load((DEPLOY / "ray/tpu.yaml").read_text())
    _, (application,) = ray_applications(service["spec"]["serveConfigV2"], keys)
    replica = ray_options(application)["qwen"]
    arguments = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    cluster = service["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    limits, requests = (container["resources"][name] for name in ("limits", "requests"))
    assert limits == requests
    chips = int(limits["google.com/tpu"])
    hosts = hosts_of(arguments["tensor-parallel-size"], chips, "TPU")
    assert hosts == (workers["numOfHosts"], chips)
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert math.prod(map(int, topology.split("x"))) == hosts[0] * chips
    # The replica's process runs beside one of the workers.
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert int(limits["cpu"]) > replica.ray_actor_options["num_cpus"]


def test_machines_of_ray_divide_the_devices() -> None:
    assert hosts_of(2, 4, "TPU") == (1, 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size: 6 cannot be divided over"):
        hosts_of(6, 4, "TPU")
    with pytest.raises(ConfigError, match="no machine of Ray's has TPU"):
        hosts_of(4, 0, "TPU")


# systemd


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters="=")
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "modulm.service")
    return parser


def test_the_unit_starts_what_is_there(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = unit()["Service"]
    text = service["ExecStart"].replace("${CREDENTIALS_DIRECTORY}", str(keys))
    text = text.replace("/etc/modulm/serve.yaml", str(DEPLOY / "serve.yaml"))
    command = shlex.split(text)
    assert command[0] == "/opt/modulm/bin/modulm"
    config = parsed(["modulm", *command[1:]])
    assert config.model.model == "Qwen/Qwen3-0.6B"
    assert float(service["TimeoutStopSec"].removesuffix("s")) > 30
    assert service["LoadCredential"].startswith("keys:")


@needs("systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "modulm.service").read_text()
    file = tmp_path / "modulm.service"
    file.write_text(text.replace("/opt/modulm/bin/modulm", "/bin/sleep"))
    output = run(str(program("systemd-analyze")), "verify", "--man=no", file)
    assert not [line for line in output.splitlines() if "modulm.service" in line], output


# nginx


@pytest.fixture
def nginx(tmp_path: Path) -> Path:
    """A whole configuration around ours."""
    main = tmp_path / "nginx.conf"
    paths = "".join(
        f"{name}_temp_path {tmp_path}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main.write_text(
        f"pid {tmp_path}/pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\n{paths}access_log off;\ninclude {tmp_path}/modulm.conf;\n}}\n"
    )
    text = (DEPLOY / "nginx.conf").read_text().replace("/etc/ssl/modulm", str(tmp_path))
    (tmp_path / "modulm.conf").write_text(text)
    return main


def directives(block: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    for each in block:
        yield each["directive"], each["args"]
        yield from directives(each.get("block", []))


def test_nginx_lets_streams_through(nginx: Path) -> None:
    payload = crossplane.parse(str(nginx), strict=True, check_args=True, check_ctx=True)
    assert payload["errors"] == []
    ours = next(each for each in payload["config"] if each["file"].endswith("modulm.conf"))
    settings = dict(directives(ours["parsed"]))
    assert settings["proxy_buffering"] == ["off"]
    assert settings["gzip"] == ["off"]
    assert settings["proxy_http_version"] == ["1.1"]
    assert settings["proxy_next_upstream"] == ["off"]
    assert settings["client_max_body_size"] == ["64m"]
    assert catalog().specs["max_request_bytes"].default == 64 << 20
    hosts = yaml.safe_load((DEPLOY / "serve.yaml").read_text())["allowed-hosts"]
    assert settings["server_name"] == hosts


@needs("nginx")
@needs("openssl")
def test_nginx_takes_it(nginx: Path) -> None:
    folder = nginx.parent
    key, certificate = folder / "key.pem", folder / "cert.pem"
    paths = ("-keyout", key, "-out", certificate, "-subj", "/CN=a.test")
    run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *paths)
    assert "successful" in run(str(program("nginx")), "-t", "-c", nginx, "-p", folder)


# Prometheus, Grafana


def test_prometheus_asks_a_route(reference: Any) -> None:
    document = yaml.safe_load((DEPLOY / "monitoring/prometheus.yml").read_text())
    (job,) = document["scrape_configs"]
    assert job["metrics_path"] in reference.described()["paths"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    host, _, port = job["static_configs"][0]["targets"][0].partition(":")
    assert host in compose["services"]
    assert port == "8000" == str(catalog().specs["port"].default)


@needs("promtool")
def test_prometheus_takes_it() -> None:
    run(str(program("promtool")), "check", "config", DEPLOY / "monitoring/prometheus.yml")


def expressions() -> list[str]:
    """Every query of the dashboard, its variables filled in."""
    board = json.loads((DEPLOY / "monitoring/dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    texts = [variable.get("query", "") for variable in board["templating"]["list"]]
    queries += [
        text.partition("(")[2].rpartition(",")[0] for text in texts if "label_values" in text
    ]
    return [
        expression.replace("$__rate_interval", "5m").replace("$job", "x").replace("$model", "y")
        for expression in queries
    ]


@pytest.fixture(scope="module")
def series(reference: Any) -> Callable[[str], bool]:
    """Whether a server has a series of that name."""
    names: set[str] = set()
    for family in reference.families():
        name = reference.name_of(family)
        ends = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("",)
        names |= {name + end for end in ends}
    return names.__contains__


METRIC = re.compile(r"\b((?:modulm:|http_|process_)\w+)")


def test_every_metric_of_the_dashboard_is_there(series: Callable[[str], bool]) -> None:
    names = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(names) > 20
    assert {name for name in names if not series(name)} == set()
    assert not series("modulm:dragons_total")


def test_metrics_that_the_page_names_are_there(series: Callable[[str], bool]) -> None:
    names = set(re.findall(r"`(modulm:\w+|http_\w+_total)`", PAGE.read_text()))
    assert len(names) > 3
    assert {n for n in names if not (series(n) or series(f"{n}_count"))} == set()


def test_queries_of_the_dashboard_are_queries() -> None:
    assert len(expressions()) > 30
    for expression in expressions():
        promql_parser.parse(expression)
    with pytest.raises(ValueError, match="."):
        promql_parser.parse("sum by (le rate(x[5m]))")


def test_panels_do_not_overlap() -> None:
    board = json.loads((DEPLOY / "monitoring/dashboard.json").read_text())
    used: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & used, panel["title"]
        assert at["x"] + at["w"] <= 24
        used |= cells


# The page


def test_the_page_names_every_file() -> None:
    text = PAGE.read_text()
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.name not in ("keys", "datasource.yml", "dashboards.yml"):
            name = path.relative_to(DEPLOY).as_posix()
            assert f"(../deploy/{name})" in text, name


def wheel(folder: Path, name: str, *requirements: str) -> Path:
    """An empty wheel with requirements."""
    path = folder / f"{name.replace('-', '_')}-0.1.0-py3-none-any.whl"
    lines = [f"Name: {name}", "Version: 0.1.0", *(f"Requires-Dist: {one}" for one in requirements)]
    with ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}.dist-info/METADATA", "\n".join(lines) + "\n")
    return path


def test_requirement_files_of_wheels_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tools/wheels.py --kernels none`; hashes where everything is locked."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from wheels import KERNELS, commands, write_requirements

    extras = (f"{KERNELS}>=0.1 ; extra == 'cpu'", "torch>=2.9 ; extra == 'cpu'",
              "ray ; extra == 'ray'")  # fmt: skip
    own = [wheel(tmp_path, "modulm", "numpy>=1.26", *extras)]
    with pytest.raises(SystemExit, match=f"there is no wheel of {KERNELS}"):
        write_requirements(tmp_path, own, ["cpu"])
    write_requirements(tmp_path, own, ["cpu"], KERNELS)
    assert (tmp_path / "modulm.txt").read_text().startswith("modulm==0.1.0 --hash=sha256:")
    assert (tmp_path / "third-party.txt").read_text() == "numpy>=1.26\ntorch>=2.9\n"
    assert (tmp_path / "locks/torch.txt").exists()
    assert "--no-deps --require-hashes" in commands(tmp_path)[0]
    write_requirements(tmp_path, own, ["cpu", "ray"], KERNELS)
    assert not (tmp_path / "locks").exists()
    assert "constraints.txt" in commands(tmp_path)[0]


def test_locks_have_the_tested_versions_and_hashes() -> None:
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    seen = set()
    for path in (ROOT / "tools/locks").iterdir():
        for entry in re.split(r"^(?=\w)", path.read_text(), flags=re.M)[1:]:
            name, version = re.match(r"([\w.-]+)(?:\[[^]]*\])?==([^\s;]+)", entry).groups()
            seen.add(name)
            assert version == tested.get(name, version), f"{name}: run tools/lock.py"
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), name
    assert seen >= {"torch", "uvicorn", "xgrammar", "numpy", "cryptography"} & tested.keys()


AUDITED = {"name": "a", "version": "1", "vulns": []}
#: What pip-audit answers -> (exit code, what is said).
AUDITS: dict[str, tuple[int, str]] = {
    json.dumps({"dependencies": [AUDITED]}): (0, "1 of 1 packages, 0 with vulnerabilities"),
    json.dumps({"dependencies": [{**AUDITED, "vulns": [{"id": "CVE-1"}]}]}): (1, "a 1: CVE-1"),
    json.dumps({"dependencies": [{"name": "a", "skip_reason": "unknown"}]}): (0, "no data"),
    "no index": (0, "audit: skipped, pip-audit gives no answer here"),
}


@pytest.mark.parametrize("answer", AUDITS)
def test_known_vulnerabilities_of_locked_packages_fail_the_check(
    answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("tool_audit", ROOT / "tools/audit.py")
    assert spec is not None
    assert spec.loader is not None
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, answer, "")

    monkeypatch.setattr(subprocess, "run", run)
    code, said = AUDITS[answer]
    assert audit.main() == code
    assert said in capsys.readouterr().out
    (command,) = commands
    locks = {str(path) for path in (ROOT / "tools/locks").glob("*.txt")}
    assert locks
    assert locks <= set(command)
