"""`modulm pull`, `modulm list`, `modulm rm`: manage huggingface_hub's cache.

The cache is shared with transformers and vLLM.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING

import click

from modulm.errors import ModulmError

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo

__all__ = ["list_command", "pull", "remove"]

_folder = click.option(
    "--download-dir",
    metavar="DIR",
    help="Folder of the cache. Default: huggingface_hub's (HF_HOME, HF_HUB_CACHE).",
)


@click.command("pull")
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit.")
@click.option("--hf-token", help="Token for gated and private models.")
@_folder
def pull(model: str, revision: str | None, hf_token: str | None, download_dir: str | None) -> None:
    """Download MODEL (owner/name on the Hub) into the local cache, unless it is there.

    Prints the folder; `modulm serve` accepts it as well as the name.
    """
    from modulm.config import EngineConfig
    from modulm.loading import open_checkpoint
    from modulm.plugins import current

    options = {"revision": revision, "hf_token": hf_token, "download_dir": download_dir}
    flags = {name: value for name, value in options.items() if value is not None}
    try:
        config = EngineConfig.from_keywords(model=model, **flags)
        folder = open_checkpoint(config, current()).path
    except ModulmError as error:
        raise click.ClickException(str(error)) from error
    click.echo(folder)


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_folder
def list_command(as_json: bool, download_dir: str | None) -> None:
    """List the models in the local Hugging Face cache, most recently used first."""
    models = _models(_cache(download_dir))
    if as_json:
        click.echo(json.dumps([_row(model) for model in models], indent=2))
        return
    if not models:
        click.echo("no model is in the cache: `modulm pull OWNER/NAME` downloads one", err=True)
        return
    width = max(len(model.repo_id) for model in models)
    for model in models:
        used = datetime.fromtimestamp(model.last_accessed).strftime("%Y-%m-%d")
        click.echo(f"{model.repo_id:{width}}  {_size(model.size_on_disk):>9}  {used}")


@click.command("rm")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@_folder
def remove(models: tuple[str, ...], yes: bool, download_dir: str | None) -> None:
    """Delete models from the local Hugging Face cache, with all their revisions."""
    cache = _cache(download_dir)
    cached = {model.repo_id: model for model in _models(cache)}
    missing = [name for name in models if name not in cached]
    if missing:
        known = f"which has {', '.join(cached)}" if cached else "which is empty"
        raise click.ClickException(f"{', '.join(missing)} is not in the cache, {known}")
    commits = [
        revision.commit_hash
        for name in dict.fromkeys(models)
        for revision in cached[name].revisions
    ]
    plan = cache.delete_revisions(*commits)
    freed = _size(plan.expected_freed_size)
    if not yes:
        click.confirm(f"delete {', '.join(dict.fromkeys(models))} ({freed})?", abort=True)
    plan.execute()
    click.echo(f"{freed} freed")


def _cache(folder: str | None) -> HFCacheInfo:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(folder)
    except CacheNotFound as error:
        raise click.ClickException(
            f"no cache at {error.cache_dir} yet: `modulm pull OWNER/NAME` creates it"
        ) from error


def _models(cache: HFCacheInfo) -> list[CachedRepoInfo]:
    models = [repo for repo in cache.repos if repo.repo_type == "model"]
    return sorted(models, key=lambda repo: (-repo.last_accessed, repo.repo_id))


def _row(model: CachedRepoInfo) -> dict[str, object]:
    return {
        "model": model.repo_id,
        "bytes": model.size_on_disk,
        "folder": str(model.repo_path),
        "revisions": sorted(revision.commit_hash for revision in model.revisions),
        "last_used": datetime.fromtimestamp(model.last_accessed).astimezone().isoformat(),
    }


def _size(amount: int) -> str:
    return f"{amount / 1e9:.2f} GB" if amount >= 1e8 else f"{amount / 1e6:.1f} MB"
