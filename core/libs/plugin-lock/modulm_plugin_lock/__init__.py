"""What is installed: lock files of plugins, and names that two packages offer.

`modulm plugins lock` writes one, `--plugins-lock FILE` requires it. Importing this package imports
no plugin.
"""

from modulm_plugin_lock.conflicts import name_conflicts
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
    "name_conflicts",
    "read_lock",
    "take_lock",
]
