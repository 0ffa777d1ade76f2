"""Lock files of plugins: which packages, with which files and options, a server may start with.

`modulm plugins lock` writes one, `--plugins-lock FILE` requires it. Importing this package imports
no plugin.
"""

from modulm_plugin_lock.lock import (
    LockedPackage,
    PluginLock,
    check_config,
    check_packages,
    lock_digest,
    read_lock,
    take_lock,
)

__all__ = [
    "LockedPackage",
    "PluginLock",
    "check_config",
    "check_packages",
    "lock_digest",
    "read_lock",
    "take_lock",
]
