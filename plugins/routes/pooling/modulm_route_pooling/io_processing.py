"""The server's IO processor (`--io-processor-plugin`): guarded calls on threads, with a limit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from modulm.errors import ConfigError, ModulmError
from modulm.plugins import current
from modulm_server.errors import ApiError
from modulm_server.flags import ServerConfig

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm_server.io_processor import IOProcessor

__all__ = ["Processor", "open_processor"]

#: Seconds that a call may take.
_LIMIT = 60.0


class Processor:
    """Calls an IO processor. origin: the plugin, for errors."""

    def __init__(self, processor: IOProcessor, origin: str) -> None:
        self._processor = processor
        self._origin = origin

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method on a thread.

        Raises errors of `modulm.errors` as they are, and ApiError(500) naming the plugin for others
        and for a call that takes too long; its thread goes on.
        """
        function = getattr(self._processor, method)
        try:
            async with asyncio.timeout(_LIMIT):
                return await asyncio.to_thread(function, *arguments)
        except (ModulmError, ApiError):
            raise
        except TimeoutError as error:
            raise self._failure(f"{method} takes more than {_LIMIT:g} s") from error
        except (Exception, SystemExit) as error:
            raise self._failure(f"{method} raised {type(error).__name__}") from error

    def _failure(self, what: str) -> ApiError:
        return ApiError(500, f"{self._origin}: {what}", code="plugin_failed")


def open_processor(config: EngineConfig) -> Processor | None:
    """Create the processor that the configuration names, or return None.

    Raises ConfigError: a server without it would not do what it was started for.
    """
    name = config.group(ServerConfig).io_processor_plugin
    if name is None:
        return None
    plugins = current()
    try:
        declared = plugins.find("io_processors", name)
        return Processor(plugins.load_declared(declared)(config), str(declared))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError("io_processor_plugin", f"{name}: {error}") from error
