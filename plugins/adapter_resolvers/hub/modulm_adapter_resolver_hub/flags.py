"""The flag of the hub resolver."""

from modulm.contracts.flags import FlagGroup, flag, flag_group
from modulm.errors import ConfigError

__all__ = ["AdapterHubConfig"]


@flag_group
class AdapterHubConfig(FlagGroup):
    """Adapters that are downloaded when a request first names them."""

    title = "Adapters on the hub"
    server = True

    lora_resolver_repos: tuple[str, ...] | None = flag(
        None,
        "Repositories that requests may load adapters from: owner/name, or owner/* for all "
        "of an owner's.",
    )

    def __attrs_post_init__(self) -> None:
        for pattern in self.lora_resolver_repos or ():
            owner, _, name = pattern.partition("/")
            if not (owner and name) or "*" in owner or ("*" in name and name != "*"):
                message = f"{pattern!r} must be owner/name or owner/*"
                raise ConfigError("lora_resolver_repos", message)
