"""Load a model: choose drivers, build it without memory, check its weights, then fill it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, field, frozen

from modulm.config.resolve import DTYPE_ALIASES
from modulm.contracts.model import CacheKind
from modulm.contracts.state import SEGMENT
from modulm.errors import CheckpointError, ConfigError, UnsupportedError
from modulm.loading.cache_groups import CacheGroup, group_caches
from modulm.loading.choices import Choices, Methods
from modulm.loading.pooling import generates, open_pooler, pooling_settings
from modulm.loading.weights import WeightPlan, expected_tensors, fill, plan_weights, weight_bytes
from modulm.nn.builder import Builder, Shared
from modulm.nn.config import read_config
from modulm.parallel import Mesh

if TYPE_CHECKING:
    from modulm.contracts.adapter import AdapterBank
    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.decision import Decision
    from modulm.contracts.loader import WeightLoader
    from modulm.contracts.model import Model
    from modulm.contracts.ops import Ops
    from modulm.contracts.platform import Platform
    from modulm.contracts.pooler import Pooler
    from modulm.contracts.quantization import QuantizationMethod
    from modulm.contracts.weight_names import WeightNames
    from modulm.nn.weight_slots import Unit
    from modulm.plugins.manager import PluginManager

__all__ = [
    "Loaded", "build_model", "explain_model", "load_model", "model_names", "plan_checkpoint",
    "state_block", "table_rows",
]  # fmt: skip

#: Aliases of --kv-cache-dtype values -> torch's names.
_KV_DTYPES = {
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
    "int4_per_token_head": "int4", "int8_per_token_head": "int8",
}  # fmt: skip
_GIB = 2**30
#: Default of --mamba-block-size: tokens between two states that are kept.
_STATE_BLOCK = 512
#: Fraction of the free memory that tables of rotary angles may use.
_TABLES = 0.1


@frozen(eq=False)
class Loaded:
    """A model that is ready to run, its caches, and the decisions behind it.

    `vocabulary`: width of the logits. `weight_bytes`: size of the weights before repacking.
    `tasks`: tasks that requests may use. `pooler`, `pooling`: the pooler and its settings, by names
    of `--pooler-config`. `layers`: applied to a pooled vector. `adapters`: the bank around its
    layers, if any. `units`: the modules that hold weights, for updates.
    """

    model: Model
    groups: tuple[CacheGroup, ...]
    decisions: tuple[Decision, ...]
    dtype: str
    vocabulary: int
    max_model_len: int
    ops: Ops
    weight_bytes: int
    tasks: tuple[str, ...] = ("generate",)
    pooler: Pooler | None = None
    pooling: Mapping[str, Any] = field(factory=dict)
    layers: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    adapters: AdapterBank | None = None
    units: Sequence[Unit] = ()


def load_model(
    config: EngineConfig,
    checkpoint: Checkpoint,
    platform: Platform,
    plugins: PluginManager,
    mesh: Mesh | None = None,
    *,
    masks: bool = False,
) -> Loaded:
    """Build the checkpoint's model on `platform` and load this rank's weights.

    masks: whether steps may have `StepLayout.masks`.

    Raises CheckpointError before any weight is read if files, names or shapes do not fit, and
    UnsupportedError or PluginError if a required driver is missing.
    """
    built = build_model(config, checkpoint, platform, plugins, mesh, masks=masks)
    fillers, about = list[Callable[..., None]](), {"model": built.model, "config": config}
    plugins.hook.modulm_model_built(**about, fillers=fillers, platform=platform)
    plan = None if built.model.load(checkpoint.path) else plan_checkpoint(built, checkpoint)
    size = weight_bytes(built.shared.units)
    if plan is not None and not fillers:
        _check_memory(size, built, platform)
    block = state_block(config, built.shared.max_length)
    groups = group_caches(built.model.caches, built.choices.backends, block)
    partials = any(spec.partial for spec in built.choices.backends)
    if built.shared.mesh.context.size > 1 and not partials:
        raise UnsupportedError(
            "decode_context_parallel_size: not supported, because no layer of this model caches "
            "the whole context"
        )
    _fill_tables(built.shared, groups, platform)
    if plan is not None:
        bar, run = config.load.use_tqdm_on_load, next(iter(fillers), fill)
        run(plan, built.loader, device=platform.device, progress=bar)
    if built.shared.adapters is not None:
        built.shared.adapters.open(built.model.weights(built.settings).apply)
    plugins.hook.modulm_model_loaded(**about)
    recipe = built.choices.recipe
    plain = generates(config, built.model, checkpoint.architecture)
    pooler = None if plain else open_pooler(config, plugins, built.model)
    settings = pooling_settings(config, recipe)
    return Loaded(
        model=built.model,
        groups=groups,
        decisions=tuple(built.choices.decisions),
        dtype=built.dtype,
        vocabulary=built.settings.vocab_size,
        max_model_len=built.shared.max_length,
        ops=built.ops,
        weight_bytes=size,
        tasks=pooler.tasks(checkpoint, built.model, settings) if pooler else built.model.tasks,
        pooler=pooler,
        pooling=pooler.settings(checkpoint, built.model, settings) if pooler else {},
        layers=recipe.layers(platform.device),
        adapters=built.shared.adapters,
        units=built.shared.units,
    )


def explain_model(
    config: EngineConfig,
    checkpoint: Checkpoint,
    platform: Platform,
    plugins: PluginManager,
    *,
    masks: bool = False,
) -> tuple[Decision, ...]:
    """Return what `load_model` would choose, and why; reads no weights and allocates no memory."""
    built = build_model(config, checkpoint, platform, plugins, masks=masks)
    return tuple(built.choices.decisions)


@frozen(eq=False)
class _Built:
    """A model without weights, and what it was built from."""

    model: Any
    settings: Any
    dtype: str
    ops: Ops
    shared: Shared
    choices: Choices
    method: QuantizationMethod
    loader: WeightLoader


def build_model(
    config: EngineConfig,
    checkpoint: Checkpoint,
    platform: Platform,
    plugins: PluginManager,
    mesh: Mesh | None = None,
    *,
    masks: bool = False,
) -> _Built:
    """Build the model without weights or memory, choosing its drivers; masks: see `load_model`."""
    choices = Choices(config, checkpoint, platform, plugins)
    driver: Any = choices.model()
    settings = read_config(checkpoint.config, driver.config_type, str(checkpoint.config_file))
    dtype = _choose_dtype(config, checkpoint, platform)
    length = _choose_length(config, settings, checkpoint)
    ops = choices.ops(dtype)
    methods = choices.method(ops)
    shared = _shared(config, choices, methods, ops, dtype, length, mesh or Mesh())
    model = driver(settings, Builder(evolve(shared, masks=masks))).eval()
    choices.decisions.extend(methods.decisions())
    return _Built(model, settings, dtype, ops, shared, choices, methods.main, choices.loader())


def plan_checkpoint(built: _Built, checkpoint: Checkpoint) -> WeightPlan:
    """Match the checkpoint's tensors to parameters. Raises CheckpointError if they do not fit."""
    shared = built.shared
    made_up = built.loader.expect(expected_tensors(shared.units))
    names = None if made_up else partial(model_names, built.model.weights(built.settings), built)
    where, requested = str(checkpoint.path), built.choices.config.model.quantization
    if requested is not None and not checkpoint.info.quantization:
        where += f" (--quantization is {requested}; config.json has no quantization_config)"
    return plan_weights(shared.units, built.loader.index(), names, where, shared.elsewhere)


def model_names(
    table: WeightNames, built: _Built, stored: str, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a stored tensor becomes, under the model's names and then the
    method's.
    """
    for name, piece in table.apply(stored, tensor):
        renamed = name if name in built.shared.scales else built.method.rename(name)
        if renamed is not None:
            yield renamed, piece


def _shared(
    config: EngineConfig,
    choices: Choices,
    methods: Methods,
    ops: Ops,
    dtype: str,
    length: int,
    mesh: Mesh,
) -> Shared:
    wanted_kv = config.cache.kv_cache_dtype
    kv_dtype = dtype if wanted_kv == "auto" else _KV_DTYPES.get(wanted_kv, wanted_kv)
    if config.cache.calculate_kv_scales and not kv_dtype.startswith("float8"):
        raise ConfigError("calculate_kv_scales", f"needs --kv-cache-dtype fp8, not {wanted_kv}")
    return Shared(
        dtype=getattr(torch, dtype),
        device=choices.platform.device,
        ops=ops,
        mesh=mesh,
        max_length=length,
        choose_method=methods.of,
        choose_backend=partial(choices.backend, ops=ops, mesh=mesh),
        kv_dtype=kv_dtype,
        kv_skipped=config.cache.kv_cache_dtype_skip_layers,
        calculate_kv_scales=config.cache.calculate_kv_scales,
        windows=not config.model.disable_sliding_window,
        adapters=choices.adapters(ops),
        config=config,
        plain=methods.plain,
    )


def _choose_dtype(config: EngineConfig, checkpoint: Checkpoint, platform: Platform) -> str:
    dtype = config.model.dtype
    if dtype == "auto":
        return platform.choose_dtype(checkpoint.info.dtype)
    name = DTYPE_ALIASES.get(dtype, dtype)
    if name not in platform.dtypes:
        raise ConfigError(
            "dtype", f"{platform.name} supports {', '.join(platform.dtypes)}, not {name}"
        )
    return name


def _choose_length(config: EngineConfig, settings: Any, checkpoint: Checkpoint) -> int:
    """Return the maximum length: --max-model-len, or the checkpoint's.

    It can be less than the positions in config.json: some models reserve the first ones for
    padding.
    """
    longest: int = settings.max_length
    if config.model.disable_sliding_window and settings.sliding_window:
        longest = min(longest, settings.sliding_window)
    length = config.model.max_model_len
    if length is None or length == checkpoint.config.get("max_position_embeddings"):
        return longest if length is None else min(length, longest)
    if length > longest:
        raise ConfigError(
            "max_model_len",
            f"{length} is more than {longest}, the limit in config.json; reduce it, or raise "
            "the limit with --hf-overrides",
        )
    return length


def state_block(config: EngineConfig, longest: int) -> int:
    """Return the tokens between two states that are kept for reuse; `longest` if none are.

    Raises ConfigError, UnsupportedError.
    """
    mode, size = config.cache.mamba_cache_mode or "none", config.cache.mamba_block_size
    if mode == "align":
        raise UnsupportedError(
            "mamba_cache_mode: align is not supported yet; all keeps states at every block"
        )
    if size is not None and (mode == "none" or size % SEGMENT):
        raise ConfigError(
            "mamba_block_size", f"must be a multiple of {SEGMENT}, with --mamba-cache-mode all"
        )
    reused = mode == "all" and config.cache.enable_prefix_caching is not False
    return min(size or _STATE_BLOCK, longest) if reused else longest


def _check_memory(size: int, built: _Built, platform: Platform) -> None:
    """Raise CheckpointError for weights that cannot fit, before allocating memory.

    Weights that are quantized while they load have their size before that only one by one.
    """
    memory, bits = platform.memory(), built.method.at_load_bits
    size = int(size * bits / torch.finfo(built.shared.dtype).bits) if bits else size
    if size > memory.free:
        raise CheckpointError(
            f"the weights need {size / _GIB:.2f} GiB and {platform.name} has "
            f"{memory.free / _GIB:.2f} GiB free of {memory.total / _GIB:.2f} GiB"
        )


def table_rows(length: int, groups: Sequence[CacheGroup], memory: int) -> int:
    """Return the positions in tables of rotary angles: all, or as many as `memory` can cache."""
    whole = [g for g in groups if g.kind is CacheKind.ATTENTION and g.window is None]
    bytes_per_token = sum(g.block_bytes / g.block_size for g in whole)
    return min(length, int(memory / bytes_per_token) + 1) if bytes_per_token else length


def _fill_tables(shared: Shared, groups: Sequence[CacheGroup], platform: Platform) -> None:
    """Fill the tables of rotary angles."""
    rows = table_rows(shared.max_length, groups, platform.memory().total)
    size = sum(rows * rope.size * 4 for rope in shared.ropes)
    if size > platform.memory().free * _TABLES:
        raise ConfigError(
            "max_model_len",
            f"the rotary angles of {rows} positions need {size / _GIB:.2f} GiB; set a lower one",
        )
    for table in shared.ropes.values():
        table.fill(rows, shared.max_length, shared.device)
