"""Write each model package's keys.json from the configuration classes of transformers.

    .venv/bin/python tools/model_keys.py          # write
    .venv/bin/python tools/model_keys.py --check  # list outdated files

For each model type: the defaults of keys that config.json omits, and the keys that transformers
ignores for it, so that files which contain them do not change the model.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs

from modulm.plugins import manager

#: Keys that are always read: by transformers' common code, or because files of other programs
#: contain them and their values are rejected where transformers would ignore them.
_KEPT = {
    "attn_type_list",
    "audio",
    "clip_qkv",
    "first_k_dense_replace",
    "full_attn_idxs",
    "is_causal",
    "max_position_embeddings",
    "mtp_layer_types",
    "n_positions",
    "num_nextn_predict_layers",
    "original_max_position_embeddings",
    "position_embedding_type",
    "postnorm",
    "rope_parameters",
    "rope_scaling",
    "rotary_dim",
    "scoring_func",
    "sliding_windows",
    "swiglu_limits",
    "topk_method",
    "vocab_size",
}
#: Keys that a class of transformers has but its code never reads.
_DEAD = {
    "bailing_hybrid": ("tie_word_embeddings",),
    "deepseek_v2": ("norm_topk_prob",),
    "deepseek_v32": ("mlp_bias",),
    "gemma3_text": ("attn_logit_softcapping",),
    "glm_moe_dsa": ("mlp_bias",),
    "kimi_linear": ("tie_word_embeddings",),
    "nemotron_h": ("tie_word_embeddings",),
    "olmoe": ("sliding_window",),
}


def tables(names: Iterable[str] | None = None) -> dict[Path, dict[str, Any]]:
    """Return keys.json of each package that has one: model type -> defaults and unknown keys.

    names: only these models, by their architectures.
    """
    import transformers

    files: dict[Path, dict[str, Any]] = {}
    plugins = manager.current()
    for name in [each.name for each in plugins.names("models")] if names is None else names:
        theirs = getattr(getattr(transformers, name, None), "config_class", None)
        if theirs is None:
            continue
        mine = plugins.load("models", name).config_type
        package = import_module(mine.__module__.partition(".")[0])
        file = Path(str(package.__file__)).parent / "keys.json"
        by_type = files.setdefault(file, {})
        by_type.setdefault(theirs.model_type, describe(theirs, mine))
    return {file: dict(sorted(table.items())) for file, table in files.items()}


def describe(theirs: Any, mine: type) -> dict[str, Any]:
    """Return what a class of transformers defines for the keys that ours reads."""
    aliases = getattr(mine, "ALIASES", {})
    read = {field.name for field in attrs.fields(mine)}
    known = {field.name: field for field in fields(theirs)}
    defaults = {
        name: default(field)
        for name, field in known.items()
        if aliases.get(name, name) in read and default(field) is not None
    }
    theta = default_theta(theirs)
    if "rope_theta" in read and "rope_theta" not in known and isinstance(theta, int | float):
        defaults["rope_theta"] = float(theta)
    return {"defaults": dict(sorted(defaults.items())), "unknown": unknown(theirs, mine, known)}


def default_theta(theirs: Any) -> Any:
    """Return a class's default of rope_theta; of its full attention, where layers differ."""
    tables = getattr(theirs(), "rope_parameters", None) or {}
    table = tables.get("full_attention")
    if isinstance(table, dict):
        return table.get("rope_theta")
    return getattr(theirs, "default_theta", None)


def default(field: Field[Any]) -> Any:
    """Return a key's default; lists are derived by the families from other keys."""
    if field.default_factory is not MISSING:
        value = field.default_factory()
    else:
        value = None if field.default is MISSING else field.default
    return value if isinstance(value, int | float | str) else None


def unknown(theirs: Any, mine: type, known: Any) -> list[str]:
    """Return our keys that transformers never reads for this model."""
    source, aliases = sources(theirs), getattr(mine, "ALIASES", {})
    mapped = {*theirs.attribute_map, *theirs.attribute_map.values()}
    names = set(_DEAD.get(theirs.model_type, ()))
    for name in {field.name for field in attrs.fields(mine)} - _KEPT - set(known) - mapped:
        if name in aliases or (name == "rope_theta" and "rope_parameters" in known):
            continue
        if not re.search(rf"(?:config|self)\.{name}\b|[\"']{name}[\"']|def {name}\b", source):
            names.add(name)
    return sorted(names)


def sources(theirs: Any) -> str:
    """Return the code of a model: its configuration and modules."""
    folder = Path(inspect.getfile(theirs)).parent
    configuration = "\n".join(
        f.read_text(encoding="utf-8") for f in sorted(folder.glob("config*.py"))
    )
    models = "\n".join(f.read_text(encoding="utf-8") for f in sorted(folder.glob("modeling_*.py")))
    return configuration + models.replace("self.config.", "config.").replace("self.", "")


def encode(table: Mapping[str, Any]) -> str:
    """Return the text of a file."""
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    stale = []
    for file, table in tables().items():
        text = encode(table)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(file)
            if "--check" not in arguments:
                file.write_text(text, encoding="utf-8")
    for file in stale:
        print(file)
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
