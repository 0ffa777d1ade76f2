"""Every error that modulm raises on purpose, and what a caller can do about it.

ModulmError
├── ConfigError               a flag, YAML key or keyword has a wrong value
├── PluginError               a plugin cannot be used
│   ├── PluginNotFound        nobody offers the name
│   │   └── ArchitectureNotFound
│   ├── PluginConflict        two distributions offer one name
│   ├── PluginBroken          importing or registering it raised
│   └── PluginIncompatible    it was written for another contract version
├── UnsupportedError          understood, but nothing installed can do it
├── CheckpointError           files on disk are missing, truncated or inconsistent
├── RequestError              one request is wrong; it ends, nothing else does
│   ├── ContextLengthExceeded prompt and answer do not fit into the model's context
│   ├── QueueFull             try again later
│   └── NotFound              the request names something that does not exist
└── EngineError               the engine failed a step
    ├── RowError              one row of a step failed; the others are unhurt
    ├── ReplicaDied           the one of several engines that ran a request is gone
    ├── EngineStalled         the engine does not answer; it may come back
    ├── EngineTimeout         a call into workers took longer than its timeout
    └── EngineDead            the engine cannot go on

A message says what is wrong, names the field or file, and says what to do.
"""

__all__ = [
    "ArchitectureNotFound",
    "CheckpointError",
    "ConfigError",
    "ContextLengthExceeded",
    "EngineDead",
    "EngineError",
    "EngineStalled",
    "EngineTimeout",
    "ModulmError",
    "NotFound",
    "PluginBroken",
    "PluginConflict",
    "PluginError",
    "PluginIncompatible",
    "PluginNotFound",
    "QueueFull",
    "ReplicaDied",
    "RequestError",
    "RowError",
    "UnsupportedError",
]


class ModulmError(Exception):
    """Base of all errors that modulm raises on purpose."""


class ConfigError(ModulmError):
    """A configuration value is wrong. `field` is the flag's name with underscores."""

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
    """Two distributions offer one name and nothing says which one to take."""


class PluginBroken(PluginError):
    """Importing or registering a plugin raised; the cause is chained."""


class PluginIncompatible(PluginError):
    """A plugin states no contract version, or one that this core does not have."""


class UnsupportedError(ModulmError):
    """The input is understood, but nothing installed can carry it out."""


class CheckpointError(ModulmError):
    """A checkpoint on disk is missing, truncated or inconsistent; names file and field."""


class RequestError(ModulmError):
    """One request is wrong. `param` is the request field that is to blame, if one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.param)


class ContextLengthExceeded(RequestError):
    """The prompt, with the least that must be generated, is longer than the model's context."""


class QueueFull(RequestError):
    """The waiting queue is at its bound; `retry_after` is a hint in seconds."""

    retry_after: float = 1.0


class NotFound(RequestError):
    """The request names a model, file or response that does not exist."""


class EngineError(ModulmError):
    """The engine failed while it ran a step."""


class RowError(EngineError):
    """One row of a step failed (bad grammar, bad processor, NaN logits); the others are unhurt."""


class ReplicaDied(EngineError):
    """The one of several engines that ran a request cannot go on; the others do."""


class EngineStalled(EngineError):
    """The engine has not shown for a while that it works; calls raise this until it does."""


class EngineTimeout(EngineError, TimeoutError):
    """A call into workers took longer than its timeout; it goes on there."""


class EngineDead(EngineError):
    """The engine cannot go on; every later call raises this."""
