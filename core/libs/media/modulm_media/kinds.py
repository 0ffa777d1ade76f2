"""The driver kind that this package adds: media families."""

from modulm.plugins.kinds import Kind

__all__ = ["MEDIA_FAMILIES"]

MEDIA_FAMILIES = Kind(
    "media_families",
    "media family",
    "media",
    "modulm_media.family:MediaFamily",
    kit="modulm_media.testing:check_family",
)
