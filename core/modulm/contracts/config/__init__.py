"""The configuration of an engine: flag groups as frozen values, combined in `EngineConfig`.

Groups are declared with `modulm.contracts.flags`. `modulm.config` reads configurations from the
command line, files, the environment and keywords, and adds the flag groups of packages.
"""

from modulm.contracts.config.attention import AttentionConfig
from modulm.contracts.config.cache import CacheConfig
from modulm.contracts.config.device import DeviceConfig
from modulm.contracts.config.engine import CORE_GROUPS, EngineConfig, Notice
from modulm.contracts.config.load import LoadConfig
from modulm.contracts.config.model import ModelConfig
from modulm.contracts.config.observability import ObservabilityConfig
from modulm.contracts.config.parallel import ParallelConfig
from modulm.contracts.config.scheduler import SchedulerConfig
from modulm.contracts.config.structured_outputs import StructuredOutputsConfig
from modulm.contracts.config.tool_calls import ToolCallConfig

__all__ = [
    "API",
    "CORE_GROUPS",
    "AttentionConfig",
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "LoadConfig",
    "ModelConfig",
    "Notice",
    "ObservabilityConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "StructuredOutputsConfig",
    "ToolCallConfig",
]

API = 1
