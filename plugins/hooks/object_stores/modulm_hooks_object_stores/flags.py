"""The flag of the object stores."""

from collections.abc import Mapping
from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["ObjectStoreConfig"]


@flag_group
class ObjectStoreConfig(FlagGroup):
    """Models, adapters and tokenizers in buckets: s3://, gs:// and az://."""

    title = "Object stores"

    object_store_options: Mapping[str, Any] = flag(
        {},
        "Arguments of the store's client in fsspec (s3fs, gcsfs, adlfs), by scheme: "
        '\'{"s3": {"anon": true}}\'.',
    )
