"""Confines a process to what an isolated package may use; there is no way back.

Linux enforces most of it: Landlock (file access, TCP, signals to other processes), seccomp
(sockets), resource limits (memory). An audit hook refuses the same from Python code, on every
system; native code can pass by it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["confine"]

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
#: Landlock's rights: execute, read a file, read a folder; and those of files alone.
_READ, _FILE_RIGHTS = 0b1101, 0b111 | 1 << 14 | 1 << 15
#: Rights that each version of Landlock knows.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_BIND_AND_CONNECT, _SCOPES = 0b11, 0b11
#: seccomp's names of processors, and their numbers of socket() and io_uring_setup().
_MACHINES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
_IO_URING_SETUP, _X32 = 425, 0x40000000
_NETWORK_EVENTS = frozenset(
    {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo",
     "socket.gethostbyname", "socket.gethostbyaddr"}
)  # fmt: skip
_PROCESS_EVENTS = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork",
     "os.forkpty", "pty.spawn"}
)  # fmt: skip
_CHANGE_EVENTS = frozenset(
    {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown",
     "os.link", "os.symlink", "os.utime", "shutil.rmtree", "shutil.move"}
)  # fmt: skip
_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/sys", "/dev/urandom",
                   "/opt/intel")  # fmt: skip


def confine(
    memory: int | None, network: bool, subprocesses: bool, folders: Sequence[str]
) -> list[str]:
    """Confine this process, which must have one thread; return what is enforced and by what.

    memory: bytes that it may allocate from now. folders: those that it may write to.
    """
    enforced = []
    if memory is not None:
        _limit_memory(memory)
        enforced.append("memory by RLIMIT_DATA")
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    by_kernel = libc is not None and libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    files = by_kernel and _landlock(libc, network, folders)
    enforced.append(f"files by {'Landlock' if files else 'the audit hook'}")
    if not network:
        sockets = by_kernel and _seccomp(libc)
        enforced.append(f"network by {'seccomp' if sockets else 'the audit hook'}")
    if not subprocesses:
        enforced.append("subprocesses by the audit hook")
    _audit(network, subprocesses, folders)
    return enforced


def _limit_memory(memory: int) -> None:
    """Limit private memory to what is used now and `memory` bytes more."""
    used = 0
    statistics = Path("/proc/self/statm")
    if statistics.exists():
        used = int(statistics.read_text().split()[5]) * resource.getpagesize()
    limit = used + memory
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _landlock(libc: Any, network: bool, folders: Iterable[str]) -> bool:
    """Allow reading of Python, packages and the system, and writing below `folders` alone."""
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    rights = (1 << _RIGHTS.get(version, 16)) - 1
    sockets = _BIND_AND_CONNECT if version >= 4 and not network else 0
    scopes = _SCOPES if version >= 6 else 0
    attributes = struct.pack("=QQQ", rights, sockets, scopes)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = libc.syscall(_CREATE_RULESET, attributes, size, 0)
    if ruleset < 0:
        return False
    readable = [*sys.path, sys.prefix, sys.base_prefix, *_SYSTEM_FOLDERS]
    for path in readable:
        _allow(libc, ruleset, path, _READ & rights)
    for path in [*folders, "/dev/null"]:
        _allow(libc, ruleset, path, rights)
    restricted: bool = libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return restricted


def _allow(libc: Any, ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path or ".", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what does not exist needs no rule
    if not os.path.isdir(path or "."):
        rights &= _FILE_RIGHTS
    libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
    os.close(descriptor)


def _seccomp(libc: Any) -> bool:
    """Let socket() make nothing but local sockets."""
    if platform.machine() not in _MACHINES:
        return False
    architecture, number = _MACHINES[platform.machine()]
    load, equal, above, end = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | 13, 0x80000000
    steps = [
        (load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, kill),
        (load, 0, 0, 0), (above, 5, 0, _X32), (equal, 4, 0, _IO_URING_SETUP),
        (equal, 0, 2, number), (load, 0, 0, 16), (equal, 0, 1, 1), (end, 0, 0, allow),
        (end, 0, 0, refuse),
    ]  # fmt: skip
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    header = struct.pack("@HP", len(steps), ctypes.addressof(program))
    installed: bool = libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0) == 0
    return installed


def _audit(network: bool, subprocesses: bool, folders: Iterable[str]) -> None:
    """Refuse from Python code what the package may not use."""
    roots = [os.path.realpath(folder) for folder in folders]

    def writable(path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True  # a descriptor that is open already
        real = os.path.realpath(os.fsdecode(path))
        return real == os.devnull or any(os.path.commonpath([real, r]) == r for r in roots)

    def check_open(arguments: Sequence[Any]) -> None:
        path, mode, flags = arguments
        changes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else False
        changes = changes or (isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR)))
        if changes and not writable(path):
            raise PermissionError(f"an isolated plugin may not write to {path!r}")

    def check_change(arguments: Sequence[Any]) -> None:
        if not writable(arguments[0]):
            raise PermissionError(f"an isolated plugin may not change {arguments[0]!r}")

    def refuse(message: str) -> Callable[[Sequence[Any]], None]:
        def check(arguments: Sequence[Any]) -> None:
            raise PermissionError(message)

        return check

    checks: dict[str, Callable[[Sequence[Any]], None]] = {"open": check_open}
    checks |= dict.fromkeys(_CHANGE_EVENTS, check_change)
    if not network:
        message = "an isolated plugin may not use the network"
        checks |= dict.fromkeys(_NETWORK_EVENTS, refuse(message))
    if not subprocesses:
        message = "an isolated plugin may not start processes"
        checks |= dict.fromkeys(_PROCESS_EVENTS, refuse(message))

    def hook(event: str, arguments: Sequence[Any]) -> None:
        check = checks.get(event)
        if check is not None:
            check(arguments)

    sys.addaudithook(hook)
