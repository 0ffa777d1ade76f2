"""Every encoder with a decoder, with its real processor, against transformers: one row each."""

from __future__ import annotations

import numpy as np
import openai
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from samples import parametrize_sample, sample

import modulm
from modulm import BeamSearchParams, SamplingParams
from modulm.config.sources import keywords
from modulm.errors import ModulmError, RequestError
from modulm.testing.checkpoints import make_tiny
from modulm_frontend.statistics import Statistics
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import serve_in_thread

#: Architecture -> what changes in its config.json. Those that hear are given sounds.
FAMILIES = {
    "WhisperForConditionalGeneration": {"max_target_positions": 192},
    "BartForConditionalGeneration": {"max_position_embeddings": 192},
    "MBartForConditionalGeneration": {"max_position_embeddings": 192},
    "M2M100ForConditionalGeneration": {"max_position_embeddings": 192},
    "MarianMTModel": {"max_position_embeddings": 192},
    "T5ForConditionalGeneration": {"n_positions": 192},
    "CohereAsrForConditionalGeneration": {"max_position_embeddings": 192},
    "CanaryForConditionalGeneration": {},
}
#: Architecture, what changes, and whether a head is stored that is not the embedding.
VARIANTS = {
    "mT5": ("MT5ForConditionalGeneration", {"feed_forward_proj": "gated-gelu"}, False),
    "UMT5": ("UMT5ForConditionalGeneration", {"feed_forward_proj": "gated-silu"}, False),
    "FLAN-T5": (
        "T5ForConditionalGeneration",
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        True,
    ),
}
HEARS = {
    "WhisperForConditionalGeneration", "CohereAsrForConditionalGeneration",
    "CanaryForConditionalGeneration",
}  # fmt: skip
#: What decoders begin with, and the tokens of what encoders read.
BEGUN = ([1, 5, 6, 7], [1], [1, 9, 300])
TEXTS = (list(range(20, 37)), [40, 41], list(range(50, 90)))
SETTINGS = {"device": "cpu", "dtype": "float32", "max_logprobs": -1, "block_size": 32}
TOLERANCE = 1e-3
SEARCH = {
    "num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 6, "min_length": 0,
    "do_sample": False, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "no_repeat_ngram_size": 0, "length_penalty": 1.0, "early_stopping": False,
}  # fmt: skip


class Family:
    """A tiny checkpoint in both engines, and three prompts for it."""

    def __init__(self, folder, architecture, changes, headed=False):
        make_tiny(folder, architecture, **changes)
        tensors = load_file(folder / "model.safetensors")
        # T5 does not divide scores by the root of the width, but begins with queries that are so
        # much smaller. With weights of unit gain most of attention would be on one token, and the
        # rounding of fp32 grows to 0.005 in log probabilities, in transformers, too.
        for name in [name for name in tensors if name.endswith("Attention.q.weight")]:
            tensors[name] *= 8**-0.5
        if headed:
            tensors["lm_head.weight"] = tensors["shared.weight"].flip(0) / 9
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        self.folder, self.vocabulary, self.architecture = folder, 512, architecture
        self.model = getattr(hf, architecture).from_pretrained(folder, dtype=torch.float32).eval()
        if architecture in HEARS:
            hears = self.extractor()
            hears.save_pretrained(folder)
            random = np.random.default_rng(0)
            sounds = [random.standard_normal(n).astype(np.float32) / 9 for n in (5000, 14000, 8000)]
            heard = [hears(one, sampling_rate=16000, return_tensors="pt") for one in sounds]
            names = ("input_features", "attention_mask")
            self.inputs = [{name: one[name] for name in names if name in one} for one in heard]
            self.prompts = [
                {"prompt_token_ids": decoder_start, "multi_modal_data": {"audio": (sound, 16000)}}
                for decoder_start, sound in zip(BEGUN, sounds, strict=True)
            ]
        else:
            self.inputs = [{"input_ids": torch.tensor([ids])} for ids in TEXTS]
            self.prompts = [
                {"encoder_prompt": {"prompt_token_ids": ids}, "decoder_prompt": decoder_start}
                for decoder_start, ids in zip(BEGUN, TEXTS, strict=True)
            ]

    def extractor(self):
        """What makes spectrograms of sounds of at most a second."""
        config = self.model.config
        if self.architecture == "WhisperForConditionalGeneration":
            seconds = config.max_source_positions // 50
            return hf.WhisperFeatureExtractor(config.num_mel_bins, chunk_length=seconds)
        bins = config.encoder_config.num_mel_bins
        if self.architecture == "CanaryForConditionalGeneration":
            return hf.ParakeetFeatureExtractor(bins)
        return hf.CohereAsrFeatureExtractor(bins, max_audio_clip_s=1.0, overlap_chunk_second=0.0)

    def ask(self, most=8, n=1, **flags):
        """Answers with the likeliest tokens of each position, and how often rows were preempted."""
        with modulm.LLM(str(self.folder), **SETTINGS, **flags) as llm:
            counted = Counted()
            llm.count_by(counted)
            answers = llm.generate(self.prompts, greedily(most, logprobs=8, n=n))
        return answers, counted.preempted

    def expected(self, index, tokens):
        """[tokens, vocabulary] log probabilities of what transformers' decoder would say next."""
        with torch.inference_mode():
            output = self.model(**self.inputs[index], decoder_input_ids=torch.tensor([tokens]))
        return output.logits[0].log_softmax(-1)


def greedily(most, **options):
    return SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, **options)


class Counted(Statistics):
    preempted = 0

    def step(self, stats):
        self.preempted += stats.preempted


@pytest.fixture(scope="module", params=sample(FAMILIES, every=4))
def family(request, tmp_path_factory):
    return Family(tmp_path_factory.mktemp("crossed"), request.param, FAMILIES[request.param])


@pytest.fixture(scope="module")
def llm(family):
    """The family's engine as it is by itself."""
    with modulm.LLM(str(family.folder), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(family, llm):
    """Answers with the log probabilities of whole vocabularies."""
    return llm.generate(family.prompts, greedily(8, logprobs=-1))


def same(actual, answers):
    """The tokens of answers, and the log probabilities of what they list."""
    for one, other in zip(actual, answers, strict=True):
        (choice, *_), (known, *_) = one.outputs, other.outputs
        assert choice.token_ids == known.token_ids
        for entry, whole in zip(choice.logprobs, known.logprobs, strict=True):
            assert max(abs(entry[i].logprob - whole[i].logprob) for i in entry) < TOLERANCE


def check_like_transformers(family, answers):
    for index, answer in enumerate(answers):
        (choice,) = answer.outputs
        decoder_start = answer.prompt_token_ids
        expected = family.expected(index, [*decoder_start, *choice.token_ids[:-1]])[
            len(decoder_start) - 1 :
        ]
        assert choice.token_ids == expected.argmax(-1).tolist()
        for entry, row in zip(choice.logprobs, expected, strict=True):
            listed = torch.tensor([logprob.logprob for logprob in entry.values()])
            assert (listed - row[list(entry)]).abs().max() < TOLERANCE


def test_answers_are_those_of_transformers(family, answers) -> None:
    assert all(len(entry) == family.vocabulary for entry in answers[0].outputs[0].logprobs)
    check_like_transformers(family, answers)


@parametrize_sample("variant", VARIANTS, every=4)
def test_variants_give_the_answers_of_transformers(variant, tmp_path) -> None:
    family = Family(tmp_path, *VARIANTS[variant])
    with modulm.LLM(str(family.folder), **SETTINGS) as llm:
        check_like_transformers(family, llm.generate(family.prompts, greedily(8, logprobs=-1)))


@parametrize_sample("backend", ["sdpa", "cpu_paged"], every=2)
def test_prompts_in_pieces_and_both_backends(family, answers, backend) -> None:
    if backend == "cpu_paged" and "T5" in family.architecture:
        with pytest.raises(ModulmError, match="biases"):
            family.ask(attention_backend=backend)
        return
    results, _ = family.ask(long_prefill_token_threshold=2, attention_backend=backend)
    same(results, answers)


def test_preempted_rows_are_encoded_again(family, answers) -> None:
    # Room for three encoders' outputs, and less than all that the decoders go on to say.
    again, preempted = family.ask(most=70, num_gpu_blocks_override=8)
    assert preempted
    check_like_transformers(family, again)
    assert [a.outputs[0].token_ids[:8] for a in again] == [a.outputs[0].token_ids for a in answers]


@parametrize_sample(
    "family",
    [
        "WhisperForConditionalGeneration",
        "BartForConditionalGeneration",
        "T5ForConditionalGeneration",
    ],
    every=3,
    indirect=True,
)
def test_ranks_share_heads_that_look_at_an_encoder(family, answers) -> None:
    results, _ = family.ask(tensor_parallel_size=2)
    same(results, answers)


@pytest.mark.parametrize("family", ["T5ForConditionalGeneration"], indirect=True)
def test_completions_are_answers_to_their_prompts(family, llm) -> None:
    prompts = ["Hello! How are you?", "The capital of France"]
    params = SamplingParams(temperature=0, max_tokens=6)
    wanted = [answer.outputs[0].text for answer in llm.generate(prompts, params)]
    flags = {"served_model_name": "m", "disable_frontend_multiprocessing": True, **SETTINGS}
    config = keywords(model=str(family.folder), **flags).config
    engine = AsyncLLM.from_config(config)
    request = {"model": "m", "prompt": prompts, "max_tokens": 6, "temperature": 0}
    try:
        with (
            serve_in_thread(engine, config) as live,
            openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
        ):
            answer = client.completions.create(**request)
            streamed = ["", ""]
            for chunk in client.completions.create(**request, stream=True):
                for choice in chunk.choices:
                    streamed[choice.index] += choice.text
    finally:
        engine.shutdown()
    assert [choice.text for choice in answer.choices] == streamed == wanted


@pytest.mark.exhaustive
def test_several_answers_and_row_by_row(family, answers) -> None:
    results, _ = family.ask(n=2, batch_invariant=True)
    same(results, answers)
    assert all(a.outputs[0].token_ids == a.outputs[1].token_ids for a in results)


def test_beams_are_those_of_transformers(family, llm) -> None:
    inputs, decoder_start = family.inputs[0], BEGUN[0]
    with torch.inference_mode():
        beams = hf.GenerationMixin.generate(
            family.model, **inputs, **SEARCH, decoder_input_ids=torch.tensor([decoder_start])
        )
    ends = family.model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends)
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    (answer,) = llm.beam_search([family.prompts[0]], params)
    mine = [beam.tokens[len(decoder_start) :] for beam in answer.sequences]
    wanted = []
    for tokens in beams[:, len(decoder_start) :].tolist():
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        wanted.append(tokens[:stop])
    assert mine == wanted


def test_what_lacks_something_to_encode_is_refused(family, llm) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=2)
    if "audio" in str(family.prompts[0]):
        with pytest.raises(RequestError, match="the model needs audio in the prompt"):
            llm.generate({"prompt_token_ids": [1]}, greedy)
        seconds = 8 if "Canary" in family.architecture else 1
        short, long = ((np.zeros(n, np.float32), 16000) for n in (8000, 17000 * seconds))
        for audio, why in (([short, short], "2 items: the model takes one audio"),
                           (long, f"the model accepts {seconds};")):  # fmt: skip
            with pytest.raises(RequestError, match=why):
                llm.generate({"prompt_token_ids": [1], "multi_modal_data": {"audio": audio}})
    else:
        with pytest.raises(RequestError, match="at most"):
            llm.generate({"prompt_token_ids": [7] * 2000}, greedy)
        with pytest.raises(RequestError, match="vocabulary"):
            llm.generate({"prompt_token_ids": [700]}, greedy)
    assert len(llm.generate(family.prompts[:1], greedy)[0].outputs[0].token_ids)
