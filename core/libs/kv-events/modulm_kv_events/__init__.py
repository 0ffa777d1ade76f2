"""Events of the prefix cache: which blocks are stored and evicted, for routers."""

from modulm_kv_events.flags import KVEventsConfig, Settings
from modulm_kv_events.settings import settings_of

__all__ = ["KVEventsConfig", "Settings", "settings_of"]
