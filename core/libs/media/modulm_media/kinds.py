"""The kind of driver that this package brings: how a family's prompts take media."""

from modulm.plugins.kinds import Kind

__all__ = ["MEDIA_FAMILIES"]

MEDIA_FAMILIES = Kind("media_families", "media family", "media", "modulm_media.family:MediaFamily")
