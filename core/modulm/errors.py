"""The exceptions that modulm raises.

ModulmError
├── ConfigError               a flag, YAML key or keyword has a wrong value
├── PluginError               a plugin cannot be used
│   ├── PluginNotFound        no installed package offers the name
│   │   └── ArchitectureNotFound
│   ├── PluginConflict        two distributions offer one name
│   ├── PluginBroken          importing or registering it failed
│   └── PluginIncompatible    it was written for another contract version
├── UnsupportedError          valid, but nothing installed supports it
├── CheckpointError           files on disk are missing, truncated or inconsistent
├── RequestError              one request is invalid; others are not affected
│   ├── ContextLengthExceeded prompt and output do not fit into the model's context
│   ├── QueueFull             try again later
│   │   └── EngineAsleep      the engine sleeps: wake it up
│   └── NotFound              the request names something that does not exist
└── EngineError               the engine failed a step
    ├── RowError              one row of a step failed; others are not affected
    ├── ReplicaDied           the replica that ran a request has died
    ├── EngineStalled         the engine does not respond; it may recover
    ├── EngineTimeout         a call into workers took longer than its timeout
    └── EngineDead            the engine cannot continue

Messages say what is wrong, name the field or file, and say what to do.
"""

__all__ = [
    "ArchitectureNotFound", "CheckpointError", "ConfigError", "ContextLengthExceeded",
    "EngineAsleep", "EngineDead", "EngineError", "EngineStalled", "EngineTimeout", "ModulmError",
    "NotFound", "PluginBroken", "PluginConflict", "PluginError", "PluginIncompatible",
    "PluginNotFound", "QueueFull", "ReplicaDied", "RequestError", "RowError", "UnsupportedError",
]  # fmt: skip


class ModulmError(Exception):
    """Base class of modulm's exceptions."""


class ConfigError(ModulmError):
    """A configuration value is invalid. `field` is the flag's name with underscores."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.field, self.message)


class PluginError(ModulmError):
    """A plugin cannot be used."""


class PluginNotFound(PluginError):
    """No installed distribution offers the name."""


class ArchitectureNotFound(PluginNotFound):
    """No installed plugin provides the model architecture that a checkpoint names."""


class PluginConflict(PluginError):
    """Two distributions offer the same name with equal priority."""


class PluginBroken(PluginError):
    """Importing or registering a plugin failed; the cause is chained."""


class PluginIncompatible(PluginError):
    """A plugin states no contract version, or one that this core does not have."""


class UnsupportedError(ModulmError):
    """The input is valid, but nothing installed supports it."""


class CheckpointError(ModulmError):
    """A checkpoint on disk is missing, truncated or inconsistent; names file and field."""


class RequestError(ModulmError):
    """A request is invalid. `param` is the field that caused it, if a single one did."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.param)


class ContextLengthExceeded(RequestError):
    """The prompt and the minimum output do not fit into the model's context."""


class QueueFull(RequestError):
    """The waiting queue is full; `retry_after` is a hint in seconds."""

    retry_after: float = 1.0


class EngineAsleep(QueueFull):
    """The engine sleeps and takes no requests."""


class NotFound(RequestError):
    """The request names a model, file or response that does not exist."""


class EngineError(ModulmError):
    """The engine failed a step."""


class RowError(EngineError):
    """One row of a step failed (grammar, logits processor, NaN logits); others are not affected."""


class ReplicaDied(EngineError):
    """The replica that ran a request has died; other replicas continue."""


class EngineStalled(EngineError):
    """The engine does not respond; calls raise this until it recovers."""


class EngineTimeout(EngineError, TimeoutError):
    """A call into workers took longer than its timeout; it continues there."""


class EngineDead(EngineError):
    """The engine cannot continue; all later calls raise this."""
