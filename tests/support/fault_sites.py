"""Awaits, socket and file operations of modules, found in their source, and faults at any of them.

`sites_of` lists them by AST. `Faults` replaces the code of a module's functions with one that asks
at each of these before it goes on, so that a test can let a single one fail.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import errno
import inspect
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

__all__ = ["Faults", "fail", "kinds_of", "sites_of", "transformed"]

#: Methods and functions, by their last name, that ask the kernel for something that may fail.
OPERATIONS = frozenset(
    {
        "accept", "bind", "chmod", "connect", "connect_ex", "copyfileobj", "create_connection",
        "create_server", "dup", "fdopen", "flock", "fork", "fsync", "ftruncate", "getaddrinfo",
        "iterdir", "link", "listen", "makedirs", "memfd_create", "mkdir", "mkdtemp", "mkstemp",
        "mmap", "open", "pipe", "Popen", "pread", "pwrite", "read_bytes", "read_text", "recv",
        "recv_fds", "recv_into", "recvfrom", "rename", "rglob", "rmdir", "rmtree", "scandir",
        "send_fds", "sendall", "sendmsg", "sendto", "socketpair", "stat", "symlink_to",
        "TemporaryDirectory", "TemporaryFile", "touch", "truncate", "unlink", "write_bytes",
        "write_text",
    }
)  # fmt: skip
#: Names that other types have too: only with these owners.
OWNED = frozenset(
    {("os", "read"), ("os", "write"), ("os", "replace"), ("socket", "socket"),
     ("shutil", "copyfile"), ("subprocess", "run")}
)  # fmt: skip
ASK = "__fault__"
#: Operations of sockets, which lose their peers rather than their disks.
SOCKETS = frozenset(
    {
        "accept", "bind", "connect", "connect_ex", "create_connection", "create_server",
        "getaddrinfo", "listen", "recv", "recv_fds", "recv_into", "recvfrom", "send_fds",
        "sendall", "sendmsg", "sendto", "socket", "socketpair",
    }
)  # fmt: skip
#: The place of the size, or of the data, among the arguments of operations that may do less.
SHORT = {
    "os.read": 1, "os.write": 1, "os.pread": 1, "os.pwrite": 1, "recv": 0, "recv_into": 0,
    "recvfrom": 0,
}  # fmt: skip

#: Operations named like one of these that do all of it or fail: a collective's.
WHOLE = frozenset({"self.backend.recv"})


def kinds_of(site: str) -> tuple[str, ...]:
    """The faults that may happen at a site: "cancel", "short" or the names of errnos."""
    if "async with aclosing(" in site:  # it only remembers what to close
        return ("cancel",)
    kind, text = site.partition(": ")[2].split(maxsplit=1)
    if kind != "call":
        return ("cancel", "EIO")
    text = text.partition(" (")[0]
    name = text.rpartition(".")[2]
    short = ("short",) if {text, name} & SHORT.keys() and text not in WHOLE else ()
    if name in SOCKETS:
        return ("ECONNRESET", "ETIMEDOUT", "EMFILE", *short)
    return ("ENOSPC", "EIO", "EMFILE", *short)


def _shortened(operation: Callable[..., Any], place: int) -> Callable[..., Any]:
    """The operation, which does a part of what it is asked for, as the kernel may."""

    def run(*args: Any, **keywords: Any) -> Any:
        least: Any = args[place]
        if isinstance(least, int):
            least = min(least, 1)
        elif memoryview(least).nbytes:
            view = memoryview(least).cast("B")
            least = view[: max(1, view.nbytes // 2)]
        return operation(*args[:place], least, *args[place + 1 :], **keywords)

    return run


def _operation(node: ast.Call) -> bool:
    if any(one.arg == "ignore_errors" for one in node.keywords):  # rmtree that raises nothing
        return False
    match node.func:
        case ast.Name(id=name):
            return name in OPERATIONS
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in OWNED:
            return True
        case ast.Attribute(attr="replace"):  # of a path: that of a text has two arguments
            return len(node.args) == 1 and not node.keywords
        case ast.Attribute(attr=name):
            return name in OPERATIONS
    return False


class _Sites(ast.NodeTransformer):
    """Collects the sites of a module, and makes each ask before it goes on."""

    def __init__(self) -> None:
        self.sites: list[str] = []
        self._scope: list[str] = []
        self._seen: Counter[str] = Counter()

    def _ask(self, kind: str, node: ast.expr, text: str) -> ast.expr:
        """The site's name has no line number: it is the same until its own code changes."""
        name = f"{'.'.join(self._scope) or 'module'}: {kind} {' '.join(text.split())[:60]}"
        self._seen[name] += 1
        if self._seen[name] > 1:
            name += f" ({self._seen[name]})"
        self.sites.append(name)
        asked = ast.Call(ast.Name(ASK, ast.Load()), [ast.Constant((self.module, name)), node], [])
        return ast.fix_missing_locations(ast.copy_location(asked, node))

    module = ""

    def _inside(self, node: Any) -> Any:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _inside

    def visit_Await(self, node: ast.Await) -> Any:
        text = ast.unparse(node.value)
        self.generic_visit(node)
        node.value = self._ask("await", node.value, text)
        return node

    def visit_AsyncWith(self, node: ast.AsyncWith) -> Any:
        texts = [ast.unparse(item.context_expr) for item in node.items]
        self.generic_visit(node)
        for item, text in zip(node.items, texts, strict=True):
            if text == "AsyncExitStack()":  # an empty list, whose entry cannot fail
                continue
            item.context_expr = self._ask("async with", item.context_expr, text)
        return node

    def visit_AsyncFor(self, node: ast.AsyncFor) -> Any:
        text = ast.unparse(node.iter)
        self.generic_visit(node)
        node.iter = self._ask("async for", node.iter, text)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        operation = _operation(node)
        text = ast.unparse(node.func) if operation else ""
        self.generic_visit(node)
        if operation:
            node.func = self._ask("call", node.func, text)
        return node


def _transform(path: Path, module: str) -> tuple[list[str], ast.Module]:
    tree, sites = ast.parse(path.read_text()), _Sites()
    sites.module = module
    tree = sites.visit(tree)
    return sites.sites, tree


def sites_of(path: Path) -> list[str]:
    """The sites inside functions of a file: what runs at import cannot fail one at a time."""
    return [site for site in _transform(path, "")[0] if not site.startswith("module: ")]


def transformed(path: Path, module: str) -> CodeType:
    """The code of a module whose sites ask `Faults` before they go on."""
    _, tree = _transform(path, module)
    return compile(tree, str(path), "exec", dont_inherit=True)


def _functions(value: Any, module: str, seen: set[int]) -> Iterator[FunctionType]:
    """The functions that a module or class defines, below decorators too."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, FunctionType):
        if value.__module__ == module or value.__globals__.get("__name__") == module:
            yield value
        for cell in value.__closure__ or ():
            try:
                yield from _functions(cell.cell_contents, module, seen)
            except ValueError:
                continue
    elif isinstance(value, type):
        if value.__module__ == module:
            for item in list(vars(value).values()):
                yield from _functions(item, module, seen)
            found = getattr(vars(value).get("__getattr__"), "__globals__", {})
            for item in found.get("cached_properties", {}).values():  # of attrs' slotted classes
                yield from _functions(item, module, seen)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _functions(value.__func__, module, seen)
    elif isinstance(value, property):
        for part in (value.fget, value.fset):
            yield from _functions(part, module, seen)
    elif inner := getattr(value, "func", None) if type(value).__name__ == "cached_property" else 0:
        yield from _functions(inner, module, seen)
    if isinstance(inner := getattr(value, "__wrapped__", None), FunctionType):
        yield from _functions(inner, module, seen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


class _Interrupted:
    """A coroutine that gets an error where it first waits, or after its end: what it must tidy up
    is then its own, as if what it waits for had failed.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], error: BaseException) -> None:
        self._coroutine, self._error = coroutine, error

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        try:
            next(steps)
        except StopIteration:
            raise self._error from None
        try:
            waited_for = steps.throw(self._error)
            while True:
                try:
                    answer = yield waited_for
                except BaseException as error:
                    waited_for = steps.throw(error)
                else:
                    waited_for = steps.send(answer)
        except StopIteration as end:
            return end.value


def fail(site: str, kind: str, value: Any) -> Any:
    """Let an operation (its function) or an await (what is waited for) fail, in this way."""
    if kind == "cancel":
        task = asyncio.current_task()
        if task is not None:
            task.cancel()
        return value
    if kind == "short":
        text = site.partition(": call ")[2].partition(" (")[0]
        place = SHORT[text] if text in SHORT else SHORT[text.rpartition(".")[2]]
        return _shortened(value, place)
    number = getattr(errno, kind)
    error = OSError(number, os.strerror(number))
    if inspect.iscoroutine(value):
        return _Interrupted(value, error)
    raise error


class Faults:
    """Lets one site fail, once. reached: (module, site) in the order in which they were first met.

    The error of an operation and of an await is an OSError; `cancel` cancels the task instead.
    """

    def __init__(self) -> None:
        self.reached: dict[tuple[str, str], None] = {}
        self.site: tuple[str, str] | None = None
        self.kind = ""
        self.fired = 0

    def arm(self, site: tuple[str, str], kind: str) -> None:
        """kind: see `kinds_of`."""
        self.kind = kind
        self.site, self.fired = site, 0

    def disarm(self) -> None:
        self.site = None

    def ask(self, site: tuple[str, str], value: Any) -> Any:
        self.reached.setdefault(site)
        if site != self.site:
            return value
        self.site = None
        self.fired += 1
        return fail(site[1], self.kind, value)

    @contextmanager
    def inside(self, modules: list[ModuleType]) -> Iterator[Faults]:
        """Replace the code of the modules' functions meanwhile."""
        replaced = self.inside_for_ever(modules)
        try:
            yield self
        finally:
            for function, old in replaced:
                function.__code__ = old
            self.disarm()  # coroutines that still run have the new code

    def inside_for_ever(self, modules: list[ModuleType]) -> list[tuple[FunctionType, CodeType]]:
        """Replace the code of the modules' functions; returns them with their own code."""
        replaced: list[tuple[FunctionType, CodeType]] = []
        for module in modules:
            path = inspect.getsourcefile(module)
            if path is None:
                continue
            whole = transformed(Path(path), module.__name__)
            codes = {(one.co_qualname, one.co_firstlineno): one for one in _codes(whole)}
            seen: set[int] = set()
            for value in list(vars(module).values()):
                for function in _functions(value, module.__name__, seen):
                    old = function.__code__
                    new = codes.get((old.co_qualname, old.co_firstlineno))
                    if new is not None and new.co_freevars == old.co_freevars:
                        replaced.append((function, old))
                        function.__code__ = new
        setattr(builtins, ASK, self.ask)
        return replaced
