"""What is installed: lock files of plugins, names that two packages offer, old names of modulm.

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
from modulm_plugin_lock.old_names import ModulmDeprecationWarning, keep_old_name

__all__ = [
    "LockedPackage",
    "ModulmDeprecationWarning",
    "PluginLock",
    "check_config",
    "check_packages",
    "keep_old_name",
    "lock_digest",
    "name_conflicts",
    "read_lock",
    "take_lock",
]
