"""The kind of driver that this package adds: adapter resolvers."""

from modulm.plugins.kinds import Kind

__all__ = ["ADAPTER_RESOLVERS"]

ADAPTER_RESOLVERS = Kind(
    "adapter_resolvers",
    "adapter resolver",
    "adapter-resolver",
    "modulm_adapters.resolver:AdapterResolver",
    kit="modulm_adapters.testing:check_resolver",
)
