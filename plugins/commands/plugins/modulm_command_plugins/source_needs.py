"""What a package's source uses besides its own code: network, files, devices, subprocesses.

Read are imports and calls, without running anything. A need that the source shows must be in the
package's manifest; one that it does not show (of a dependency, or computed) may be stated too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["shown_needs"]

_MODULES = {
    "network": (
        "aiohttp", "boto3", "grpc", "http.client", "httpcore", "httpx", "huggingface_hub",
        "opentelemetry.exporter", "requests", "runai_model_streamer", "socket", "ssl",
        "tensorizer", "torch.distributed", "urllib.request", "uvicorn", "websockets", "zmq",
    ),
    "subprocesses": ("multiprocessing", "subprocess"),
    "devices": ("flash_attn", "flashinfer", "jax", "pynvml", "torch.cuda", "torch.xpu", "torchax",
                "triton"),
}  # fmt: skip
_CALLS = {
    "network": ("asyncio.open_connection", "asyncio.start_server"),
    "subprocesses": (
        "asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "os.execv",
        "os.execve", "os.fork", "os.posix_spawn", "os.system",
    ),
    "files": (
        "os.makedirs", "os.mkdir", "os.remove", "os.rename", "os.replace", "os.rmdir", "os.unlink",
        "shutil.copy", "shutil.copyfile", "shutil.copytree", "shutil.move", "shutil.rmtree",
        "tempfile.NamedTemporaryFile", "tempfile.TemporaryDirectory", "tempfile.mkdtemp",
        "tempfile.mkstemp",
    ),
}  # fmt: skip
_MODES = {f"{how}{form}" for how in ("w", "a", "x", "r+", "w+", "a+") for form in ("", "b", "t")}
#: Methods of paths that write.
_WRITES = ("mkdir", "touch", "unlink", "write_bytes", "write_text")


def shown_needs(sources: Iterable[Path]) -> dict[str, tuple[Path, int, str]]:
    """Return each need that the sources show, with the file, line and name that shows it first.

    Files that are no Python are passed over, and what serves tests: `testing.py`, `kit_sample`.
    """
    shown: dict[str, tuple[Path, int, str]] = {}
    for file in sources:
        if file.name == "testing.py":
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for need, line, name in _shown(tree):
            shown.setdefault(need, (file, line, name))
    return shown


def _shown(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    for node in _statements(tree):
        for name in _names(node):
            for need, modules in _MODULES.items():
                if any(name == module or name.startswith(f"{module}.") for module in modules):
                    yield need, node.lineno, name  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            for need, calls in _CALLS.items():
                if name in calls:
                    yield need, node.lineno, name
            if _writes(node):
                yield "files", node.lineno, name.rpartition(".")[2]


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those that only a type checker or a kit reads."""
    pending: list[ast.AST] = [tree]
    samples = {"kit_sample", *_samples(tree)}
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef) and node.name in samples:
            continue
        yield node
        if isinstance(node, ast.If) and _dotted(node.test).endswith("TYPE_CHECKING"):
            pending += reversed(node.orelse)
        else:
            pending += reversed(list(ast.iter_child_nodes(node)))


def _samples(tree: ast.AST) -> Iterator[str]:
    """Yield the functions that classes give kits: `kit_sample = staticmethod(write)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _dotted(node.targets[0]) == "kit_sample":
            for argument in getattr(node.value, "args", ()):
                yield _dotted(argument)


def _names(node: ast.AST) -> list[str]:
    """The modules and names that a node imports, or the dotted name that it reads."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    name = _dotted(node) if isinstance(node, ast.Attribute) else ""
    return [name] if name.startswith("torch.") else []


def _dotted(node: ast.AST) -> str:
    """The text of `a.b.c`; of another expression only its last attributes."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))


def _writes(call: ast.Call) -> bool:
    """Whether a call is `open` with a mode that writes, or a method of paths that does."""
    method = isinstance(call.func, ast.Attribute)
    name = _dotted(call.func).rpartition(".")[2]
    if method and name in _WRITES:
        return True
    first = 0 if method else 1
    modes = [*call.args[first : first + 1], *(k.value for k in call.keywords if k.arg == "mode")]
    return name == "open" and any(
        isinstance(mode, ast.Constant) and mode.value in _MODES for mode in modes
    )
