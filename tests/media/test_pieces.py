"""Encoders in pieces: text that streams meanwhile, and images, are as they are alone."""

from __future__ import annotations

import pytest
import torch
from samples import parametrize_sample
from tests.media.checkpoint import write_llava

import modulm
from modulm_media.step.runner import MediaRunner
from modulm_towers import Tower, through, whole
from modulm_towers.testing import images

TEXT = "Once upon a time there was a small cat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llava(tmp_path_factory.mktemp("pieces") / "llava")


@pytest.fixture
def steps(monkeypatch):
    """Of every step: rows of it, whether it encoded, and what it kept, hash by hash."""
    seen = []
    begin = MediaRunner.begin

    def noted(self, plan, value):
        busy = bool((value and value.items) or self.begun)
        before = dict(self._outputs)
        done = begin(self, plan, value)
        new_outputs = {h: o for h, o in self._outputs.items() if h not in before}
        seen.append((plan.rows.tolist(), busy, new_outputs))
        return done

    monkeypatch.setattr(MediaRunner, "begin", noted)
    return seen


def answers(folder, prompts, **settings):
    """Tokens of (how many, prompt) each, from an engine that takes two requests at a time."""
    shared = {"temperature": 0, "ignore_eos": True}
    params = [modulm.SamplingParams(max_tokens=count, **shared) for count, _ in prompts]
    settings = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2, **settings}
    with modulm.LLM(str(folder), **settings) as llm:
        results = llm.generate([prompt for _, prompt in prompts], params, use_tqdm=False)
    return [answer.outputs[0].token_ids for answer in results]


@parametrize_sample("scheduling", [True, False], every=2)
def test_text_goes_on_between_the_layers_of_an_encoder(folder, steps, scheduling):
    pictures = images(((56, 42), (30, 60)))
    mark = "<image>"
    requests = [
        (2, "Hello"),
        (24, TEXT),
        (5, {"prompt": f"{mark} is", "multi_modal_data": {"image": pictures[0]}}),
        (5, {"prompt": f"A {mark}{mark}", "multi_modal_data": {"image": pictures}}),
    ]
    tokens_by_chunk, tables = {}, {}
    for chunk in (0, 1):
        steps.clear()
        tokens_by_chunk[chunk] = answers(
            folder, requests, mm_encoder_chunk=chunk, async_scheduling=scheduling
        )
        encoding = [rows for rows, busy, _ in steps if busy]
        tables[chunk] = {h: output for _, _, outputs in steps for h, output in outputs.items()}
        if not chunk:
            assert len(encoding) == 2, "whole: a step for each prompt"
            continue
        # LLaVA's tiny encoder has two layers, one of which is read; then what is behind them.
        assert len(encoding) >= 4
        text = encoding[0][0]
        assert all(text in rows for rows in encoding), "text decodes in every step that encodes"
    single_answers = [answers(folder, [one])[0] for one in requests]
    assert tokens_by_chunk[0] == tokens_by_chunk[1] == single_answers
    assert len(tables[0]) == 2
    assert tables[0].keys() == tables[1].keys()
    assert all(torch.equal(output, tables[1][name]) for name, output in tables[0].items())


def test_pieces_make_what_a_tower_makes_at_once():
    class Twice(Tower):
        def run(self, x):
            x = yield from through([torch.sin, torch.exp], x)
            return 2 * x

    tower, x = Twice(), torch.ones(5, 3)
    assert list(tower.run(x)) == [5, 5]
    assert torch.equal(whole(tower.run(x)), tower(x))
    assert torch.equal(tower(x), 2 * x.sin().exp())
