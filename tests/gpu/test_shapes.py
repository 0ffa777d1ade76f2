"""Which steps are recorded, by the flags, and how others are padded to them."""

from __future__ import annotations

import numpy as np
import pytest

from modulm.config import EngineConfig
from modulm.config.resolve import resolve
from modulm.errors import ConfigError
from modulm.plugins import manager
from modulm_gpu.flags import MODES, CompilationConfig
from modulm_gpu.shapes import RecordedShapes, compiler, graph_mode


def config_of(**flags) -> EngineConfig:
    return EngineConfig.from_keywords(
        **{"max_num_seqs": 256, "max_num_batched_tokens": 8192, **flags}
    )


def shapes_of(**flags) -> RecordedShapes:
    return RecordedShapes.of(config_of(**flags))


@pytest.mark.parametrize(
    ("flags", "mode", "compiles"),
    [
        ({}, "FULL_AND_PIECEWISE", None),
        ({"optimization_level": 0}, "NONE", None),
        ({"optimization_level": 1}, "PIECEWISE", None),
        ({"optimization_level": 2}, "FULL_AND_PIECEWISE", None),
        ({"optimization_level": 3}, "FULL_AND_PIECEWISE", "inductor"),
        ({"optimization_level": 0, "cudagraph_mode": "full"}, "FULL", None),
        ({"compilation_config": {"mode": 3}}, "FULL_AND_PIECEWISE", "inductor"),
        ({"compilation_config": {"mode": "NONE", "level": 3}}, "FULL_AND_PIECEWISE", None),
        ({"compilation_config": {"mode": 3, "level": 1}}, "PIECEWISE", None),
        ({"compilation_config": {"mode": 1, "backend": "eager"}}, "FULL_AND_PIECEWISE", "eager"),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, "NONE", None),
    ],
)
def test_levels_and_modes(flags, mode, compiles) -> None:
    group = config_of(**flags).group(CompilationConfig)
    assert (graph_mode(group), compiler(group)) == (mode, compiles)


def test_wrong_values_are_named() -> None:
    for flags, name in (
        ({"cudagraph_mode": "SOME"}, "cudagraph_mode"),
        ({"optimization_level": 4}, "optimization_level"),
        ({"compilation_config": {"mode": 7}}, "compile_mode"),
        ({"compilation_config": {"surprise": 7}}, "compilation_config"),
    ):
        with pytest.raises(ConfigError, match=name):
            config_of(**flags)
    with pytest.raises(ConfigError, match="cudagraph_capture_sizes.*0 is not a valid number"):
        shapes_of(cudagraph_capture_sizes=[4, 0])


def test_passes_of_another_compiler_have_no_effect_and_say_so() -> None:
    config = config_of(compilation_config={"custom_ops": ["+rms_norm"], "pass_config": {"a": 1}})
    notices = [str(notice) for notice in config.notices()]
    assert len(notices) == 2
    assert all("fused operations are written as kernels" in notice for notice in notices)


def test_on_processors_the_flags_have_no_effect_and_say_so() -> None:
    config = config_of(model="demo", device="cpu", optimization_level=3, cudagraph_mode="FULL")
    platform = manager.current().load("platforms", "cpu")()
    resolved = resolve(config, platform=platform, hf_config={}, plugins=manager.current())
    notices = {notice.flag: notice.message for notice in resolved.notices}
    assert "CUDA graphs need a GPU" in notices["--optimization-level"]
    assert "CUDA graphs need a GPU" in notices["--cudagraph-mode"]


def test_sizes() -> None:
    assert shapes_of().sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert shapes_of().sizes[-3:] == (480, 496, 512)
    assert shapes_of(max_num_seqs=6).sizes == (1, 2, 4, 8)
    assert shapes_of(max_cudagraph_capture_size=20).sizes == (1, 2, 4, 8, 16)
    assert shapes_of(max_cudagraph_capture_size=0).sizes == ()
    assert shapes_of(cudagraph_capture_sizes=[9, 3, 9, 9000]).sizes == (3, 9)
    assert shapes_of(cudagraph_mode="NONE").sizes == ()


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "NONE"])
def test_every_padded_step_is_one_that_was_recorded(mode, rng) -> None:
    shapes = shapes_of(
        cudagraph_mode=mode, max_num_seqs=24, cudagraph_capture_sizes=[1, 2, 4, 8, 24, 40, 100]
    )
    recorded = {(len(step), int(step.sum())) for step in shapes.steps}
    tokens = {int(step.sum()) for step in shapes.steps}
    falling = [int(step.sum()) for step in shapes.steps if len(step) != step.sum()]
    assert falling == sorted(falling, reverse=True)
    for _ in range(200):
        counts = np.ones(rng.randint(1, 24), np.int32)
        if rng.random() < 0.7:
            counts[rng.randrange(len(counts))] = rng.randint(1, 90)
        padded = shapes.padded(counts)
        assert padded[: len(counts)].tolist() == counts.tolist()
        assert padded[len(counts) :].max(initial=0) <= shapes.padding
        single, total = counts.max() == 1, int(counts.sum())
        if len(padded) == len(counts):  # as it is: there is no such size, or it fits
            assert total > 100 or total in tokens or not (single or shapes.mixed or shapes.pieces)
            continue
        assert int(padded.sum()) in tokens
        if single or shapes.mixed:
            assert (len(padded), int(padded.sum())) in recorded


def test_rows_of_padding_are_no_longer_than_a_sequence_may_be() -> None:
    shapes = shapes_of(max_model_len=5, cudagraph_capture_sizes=[32], cudagraph_mode="PIECEWISE")
    assert max(shapes.steps[0]) == 5
    assert shapes.padded(np.array([3, 4], np.int32)).tolist() == [3, 4, 5, 5, 5, 5, 5]
