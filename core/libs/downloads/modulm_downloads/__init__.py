"""Downloads of checkpoints: the Hugging Face hub, and a cache for other sources."""

from modulm_downloads.headers import write_header
from modulm_downloads.hub import is_hub_id
from modulm_downloads.snapshots import RemoteFile, RemoteFolder, fetch_snapshot

__all__ = ["RemoteFile", "RemoteFolder", "fetch_snapshot", "is_hub_id", "write_header"]
