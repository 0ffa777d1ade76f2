"""Where logits processors come from."""

from __future__ import annotations

import pytest
import torch

from modulm.config import EngineConfig
from modulm.contracts.sampling import LogitsProcessor, SamplingParams
from modulm.engine.sampling.logits_processors import Processors, class_at, processor_classes
from modulm.engine.worker.model_runner import build_processors
from modulm.errors import ConfigError
from modulm.plugins import hookimpl, manager


class Mine(LogitsProcessor):
    api = 1

    def admit(self, view) -> bool:
        return False

    def apply_row(self, view, logits: torch.Tensor) -> torch.Tensor:
        return logits


class Step(Mine):
    """Returned by a hook."""


@pytest.fixture
def plugins():
    with manager.using(manager.PluginManager()) as made:
        yield made


def at(path: str) -> type[LogitsProcessor]:
    return class_at(path, LogitsProcessor, "logits_processors")


def test_a_class_by_path() -> None:
    assert at("modulm.contracts.sampling:LogitsProcessor") is LogitsProcessor
    assert at("modulm.contracts.sampling.LogitsProcessor") is LogitsProcessor


@pytest.mark.parametrize("path", ["no.such.module:X", "modulm:Nothing", "json:loads", "X", ""])
def test_a_path_to_nothing_names_the_flag(path) -> None:
    with pytest.raises(ConfigError) as caught:
        at(path)
    assert caught.value.field == "logits_processors"


def test_installed_ones_come_first_and_none_twice(plugins) -> None:
    plugins.register("logits_processors", "step", Step)
    installed = processor_classes(None, plugins)
    assert installed.count(Step) == 1
    assert processor_classes([Mine, "step", Step, Mine], plugins) == (*installed, Mine)


def test_the_sampler_gets_those_of_the_flag_and_the_steps_of_hooks(plugins) -> None:
    class Hooks:
        @hookimpl
        def modulm_logits_steps(self, config, vocabulary):
            return [Step(vocabulary, torch.device("cpu"))]

    plugins.add(Hooks())
    config = EngineConfig.from_keywords(logits_processors=(Mine,))
    found = build_processors(config, 100, torch.device("cpu"), plugins).all
    assert [type(processor) for processor in found[-2:]] == [Mine, Step]
    assert {processor.vocabulary for processor in found} == {100}


def test_one_may_be_opened_with_the_configuration(plugins) -> None:
    class Opened(Mine):
        @classmethod
        def open(cls, config, vocabulary, device):
            made = cls(vocabulary, device)
            made.seen = config
            return made

    config = EngineConfig.from_keywords(logits_processors=(Opened,))
    found = build_processors(config, 100, torch.device("cpu"), plugins).all
    assert found[-1].seen is config


def test_one_that_serves_fields_sees_only_rows_that_set_them() -> None:
    class Biased(Mine):
        fields = ("seed", "logit_bias")

    every, some = Mine(9, torch.device("cpu")), Biased(9, torch.device("cpu"))
    processors = Processors([every, some])
    assert processors.processors_for(SamplingParams()) == (every,)
    assert processors.processors_for(SamplingParams(seed=0)) == (every, some)
    assert processors.processors_for(SamplingParams(logit_bias={})) == (every, some)
