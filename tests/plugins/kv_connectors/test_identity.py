"""Which flags tell stored blocks apart, between runs and between engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modulm.config import EngineConfig
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm_kv_transfer.identity import encoder_facts, engine_facts, model_digest

#: Each changes keys, values, or which of them a rank has.
CHANGES: dict[str, Any] = {
    "activation_quantization": "off",
    "cp_kv_cache_interleave_size": 2,
    "disable_sliding_window": True,
    "kv_cache_dtype": "nvfp4",
    "kv_cache_dtype_skip_layers": ["0"],
    "model_impl": "transformers",
    "pipeline_layer_partition": [1, 1],
    "quantization_config": {"bits": 8},
}


def test_flags_that_change_blocks_change_their_names(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path))
    plugins = manager.current()

    def identities(**flags: Any) -> tuple[str, dict[str, str], dict[str, str]]:
        config = EngineConfig.from_keywords(model=folder, **flags)
        facts = engine_facts(config, plugins), encoder_facts(config, plugins)
        return model_digest(config, plugins), *facts

    digest, facts, encoder = identities()
    assert identities() == (digest, facts, encoder)
    for flag, value in CHANGES.items():
        other, changed, _ = identities(**{flag: value})
        assert other != digest, flag
        assert [name for name in facts if facts[name] != changed[name]] == [flag]
    changed = identities(activation_quantization="off")[2]
    assert [name for name in encoder if encoder[name] != changed[name]] == [
        "activation_quantization"
    ]
    # Rounding of the kernels: on one machine only, since engines may have different devices.
    assert identities(kernels=["none"])[0] != digest
