"""One compute thread per test process: tests run side by side, and two threads that wait for each
other on a busy core are many times slower than one.

Bytecode is kept whatever the environment says: the suite starts hundreds of processes, and without
it each would compile all that it imports.

Property tests draw the same examples in every run. `make fuzz` (tools/fuzz.py) names a seed in
MODULM_FUZZ: then they draw others, by that seed.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
import signal
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import listings
import pytest
import samples
from _pytest.logging import catching_logs
from forked_python import TEMPLATES
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from httpx._transports import default as httpx_transports
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MODULM_CPU_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Where there is no GPU Triton's kernels are interpreted. That is decided when Triton is imported,
# which libraries do by themselves.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dri")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Each process would read the entry points of all distributions, of which there are 300, for device
# backends of torch and for pydantic's plugins: 60 ms each, and there are none.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

# Servers of tests take the time that a busy machine needs: an answer is waited for, not 5 seconds.
# All of httpx's functions and clients share this object.
DEFAULT_TIMEOUT_CONFIG.read = DEFAULT_TIMEOUT_CONFIG.connect = 300
# Each client would read a hundred certificates, for servers that have none: 30 ms.
httpx_transports.create_ssl_context = functools.cache(httpx_transports.create_ssl_context)

FUZZ = None if "CI" in os.environ else os.environ.get("MODULM_FUZZ")
# How long an example takes says how busy the machine is.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", UNTIMED, derandomize=True, database=None, max_examples=50)
settings.register_profile("fuzz", UNTIMED, database=None, print_blob=True)
settings.load_profile("same" if FUZZ is None else "fuzz")
if FUZZ is None:
    # Examples do not depend on the constants in whichever modules were imported before, for which
    # hypothesis reads the source of all of them.
    providers._get_local_constants = lambda: providers._local_constants


def catch_logs(self: catching_logs[Any]) -> logging.Handler:
    """Attach pytest's handler to the root logger, as all others propagate to it (see `untouch`).

    pytest looks through the thousands of loggers that exist, six times a test.
    """
    root = logging.getLogger()
    if self.level is not None:
        self.orig_level = root.level
        self.handler.setLevel(self.level)
        root.setLevel(min(root.level, self.level))
    root.addHandler(self.handler)
    self.attached_loggers.append(root)
    return self.handler


catching_logs.__enter__ = catch_logs  # type: ignore[method-assign]

FAMILIES = ("modulm", "modulm_server", "uvicorn")
#: Where tiny checkpoints are written.
CHECKPOINTS = pytest.StashKey[Path]()


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for the processes that they have started.

    Two more take longer: they cost more processor time than they find idle.
    """
    return len(os.sched_getaffinity(0)) + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--everything",
        action="store_true",
        help="tests marked exhaustive too, and whole grids, of which make test runs samples",
    )


#: Files whose tests share no fixture that takes long: any worker takes any test of them.
SPLIT = frozenset(
    {
        "tests/distributed/test_plan_codec.py",
        "tests/e2e/server/test_faults.py",
        "tests/plugins/models/test_contract.py",
        "tests/plugins/models/test_keys.py",
        "tests/plugins/models/test_settings.py",
        "tests/plugins/models/test_transformers.py",
        "tests/plugins/models/test_variants.py",
        "tests/unit/docs/test_guides.py",
        "tests/unit/docs/test_plugin_pages.py",
    }
)


#: Begun first, so that no worker has one of them left when the others are done.
LONGEST = frozenset(
    {
        "tests/distributed/test_families.py",
        "tests/distributed/test_mp.py",
        "tests/distributed/test_ray.py",
        "tests/e2e/test_demo.py",
        "tests/plugins/platforms/test_tpu.py",
        "tests/ray_serve/test_cluster.py",
        "tests/unit/cli/test_plugin_commands.py",
    }
)


def _turn(file: str) -> tuple[bool, int]:
    return file not in LONGEST, zlib.crc32(file.encode())


class FileScheduling(LoadScopeScheduling):
    """Each file goes to one worker as a whole, so that its fixtures are made once; not SPLIT."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.startswith("tests/meta/"):
            return "tests/meta"  # they share syntax trees
        return nodeid if file in SPLIT else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """`--dist loadfile` with SPLIT files; other ways of dealing tests out are xdist's own."""
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


class FileTimes:
    """How long each file takes, to be printed when all tests have run."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slowest = sorted(self.seconds.items(), key=lambda entry: -entry[1])[:20]
        if len(slowest) == 20:
            terminalreporter.section("slowest 20 files")
            for file, seconds in slowest:
                terminalreporter.write_line(f"{seconds:7.1f}s {file}")


@pytest.fixture
def own_interpreters() -> Iterator[None]:
    """Processes start from nothing: for tests of what is imported, of memory and of signals."""
    before, TEMPLATES.enabled = TEMPLATES.enabled, False
    yield
    TEMPLATES.enabled = before


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    TEMPLATES.install()
    samples.everything = config.getoption("--everything")
    listings.share()
    share_checkpoints(config)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FileTimes(), "file times")
    elif config.getoption("durations") is None and config.getoption("verbose") <= 0:
        report_briefly(config)


def report_briefly(config: pytest.Config) -> None:
    """Send two messages for a test that passes, instead of six: its report, and that it is done.

    `FileTimes` misses setups and teardowns of less than a twentieth of a second by that.
    """
    plugins = config.pluginmanager.get_plugins()
    (interactor,) = (each for each in plugins if type(each).__name__ == "WorkerInteractor")
    send = interactor.pytest_runtest_logreport

    @pytest.hookimpl
    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed or report.duration > 0.05:
            send(report)

    config.pluginmanager.unregister(interactor)
    interactor.pytest_runtest_logreport = pytest_runtest_logreport
    interactor.pytest_runtest_logstart = interactor.pytest_runtest_logfinish = None
    config.pluginmanager.register(interactor)


def share_checkpoints(config: pytest.Config) -> None:
    """Write each tiny checkpoint once; the workers share a folder, which ends with the session."""
    from tiny_checkpoints import share

    if hasattr(config, "workerinput"):
        share(Path(config.workerinput["checkpoints"]))
        return
    folder = tempfile.TemporaryDirectory(prefix="modulm-checkpoints-")
    config.add_cleanup(folder.cleanup)
    config.stash[CHECKPOINTS] = Path(folder.name)
    share(Path(folder.name))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where the checkpoints are."""
    node.workerinput["checkpoints"] = str(node.config.stash[CHECKPOINTS])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: modules and tests stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Make no tests of calls that are `exhaustive`: half of all there are."""
    yield
    if metafunc.config.getoption("everything"):
        return
    calls = [c for c in metafunc._calls if not any(m.name == "exhaustive" for m in c.marks)]
    # Of a test without calls, pytest would make one without parameters; it is left out later.
    metafunc._calls = calls or metafunc._calls[:1]


def pytest_collection_finish() -> None:
    """Engines collect garbage when they are made and closed: not through all tests and modules.
    Between them it is collected more rarely than Python would, which takes 7 % of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is `exhaustive`, mark what draws examples, for `make fuzz`, and mix the files:
    those that wait for processes run beside those that compute. The longest begin first.
    """
    if not config.getoption("--everything"):
        exhaustive = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=exhaustive)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    if len({item.path for item in items}) > 50:
        items.sort(key=lambda item: _turn(item.nodeid.partition("::")[0]))
    for item in items:
        given = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if given or {"rng", "rounds"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("property")


@pytest.fixture
def rng() -> random.Random:
    """Random numbers: the same in every run, others in each round of `make fuzz`."""
    return random.Random(int(FUZZ or 0))


@pytest.fixture(scope="session")
def rounds() -> int:
    """How many times as much a test with `rng` may try in a round of `make fuzz`."""
    return 1 if FUZZ is None else 25


class _Loggers:
    """The root and every logger of ours and of uvicorn that exists by now."""

    def __init__(self) -> None:
        self._known = [logging.getLogger()]
        self._seen = 0
        for name in FAMILIES:
            logging.getLogger(name)

    def __iter__(self) -> Iterator[logging.Logger]:
        named = logging.root.manager.loggerDict  # to which names are only added, thousands of them
        new = list(islice(named, self._seen, None))
        self._seen += len(new)
        self._known += [logging.getLogger(name) for name in new if name.startswith(FAMILIES)]
        return iter(self._known)


loggers = _Loggers()


@pytest.fixture(autouse=True, scope="session")
def plans_go_through_bytes() -> Iterator[None]:
    """Every plan and every result of the suite is bytes once, as on its way between processes."""
    from modulm.engine.worker.model_runner import ModelRunner
    from modulm.testing.fakes import FakeExecutor
    from modulm_distributed.testing import through_bytes

    with pytest.MonkeyPatch.context() as patch:
        for kind in (ModelRunner, FakeExecutor):
            patch.setattr(kind, "run", through_bytes(kind.run))
        yield


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands under test, and fixtures that live for a module, set logging up for the whole
    process: each test starts from an untouched tree and leaves one."""
    root_handlers = logging.root.handlers[:]
    untouch()
    yield
    untouch()
    logging.root.handlers = root_handlers


def untouch() -> None:
    for log in loggers:
        level = logging.WARNING if log is logging.root else logging.NOTSET
        # setLevel forgets what isEnabledFor() of all loggers has cached, which takes a while.
        if log.level != level:
            log.setLevel(level)
        log.propagate, log.disabled = True, False
        if log is not logging.root:
            log.handlers = []
