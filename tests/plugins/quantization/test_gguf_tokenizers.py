"""Tokenizers from a file's metadata give the ids of the tokenizer whose vocabulary it holds."""

import json

import gguf
import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizer, GemmaTokenizer, LlamaTokenizer, Qwen2Tokenizer, T5Tokenizer

from modulm.errors import CheckpointError
from modulm_quant_gguf.container import open_model
from modulm_quant_gguf.loader import GGUFLoader

KIND = gguf.TokenType
SPECIAL = ["<|begin|>", "<|end|>", "<unk>"]
CORPUS = [
    "The capital of France is Paris; they're, we'll, I'd, it's HERE'S 1234567 and 3.14.",
    "def area(r):\n    return 3 * r ** 2  # spaces\n\n\nclass A:\n\tpass\r\n",
    "Größe und Übermut: naïve café, e\u0301galite\u0301. Привет, мир! 你好，世界。こんにちは 42%",
    "emoji 🙂🚀 and symbols $+<=>^~|` [x](y) {z} a/b\\c  double  spaces   end ",
    "camelCase HTTPServer snake_case ALLCAPS v1.2.3 2026-11-22T12:00",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "a",
    "\n",
    "  lead",
    "trail  ",
    "<|begin|>x<|end|> y",
    "1 22 333 4444 55555",
]

SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = (
    rf"{ENDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACE}"
)
UP, LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD = r"[^\r\n\p{L}\p{N}]?"
GPT4O = (
    rf"{WORD}{UP}*{LOW}+{ENDS}?|{WORD}{UP}+{LOW}*{ENDS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACE}"
)
TEKKEN = rf"{WORD}{UP}*{LOW}+|{WORD}{UP}+{LOW}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACE}"


def cut(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


#: As the tokenizer.json files that the names stand for have it.
PIECES = {
    "gpt-2": [],
    "llama-bpe": [cut(LLAMA3)],
    "gpt-4o": [cut(GPT4O)],
    "tekken": [cut(TEKKEN)],
    "starcoder": [pre_tokenizers.Digits(individual_digits=True)],
    "falcon": [pre_tokenizers.Punctuation("contiguous")],
}
SEEN = {name: name in ("gpt-2", "starcoder", "falcon") for name in PIECES}


def original(pre):
    """A tokenizer of byte pairs that cuts as the one called `pre` does."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    steps = [*PIECES[pre], pre_tokenizers.ByteLevel(False, use_regex=SEEN[pre])]
    if pre == "falcon":
        steps += [pre_tokenizers.Digits(False), cut("[0-9][0-9][0-9]")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS * 3, byte_trainer())
    return tokenizer


def byte_trainer():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )


def write(path, model, tokens, kinds, **more):
    """A file of nothing but a vocabulary; more: keys after `tokenizer.ggml.`"""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for key, value in more.items():
        key = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def by_id(vocabulary):
    return sorted(vocabulary, key=vocabulary.get)


def pairs(core, path, **more):
    """The byte pairs of a tokenizer in a file."""
    table = json.loads(core.to_str())
    tokens = by_id(core.get_vocab())
    added = {t["id"] for t in table["added_tokens"]}
    kinds = [KIND.CONTROL if i in added else KIND.NORMAL for i in range(len(tokens))]
    merges = [" ".join(merge) for merge in table["model"]["merges"]]
    return write(path, "gpt2", tokens, kinds, merges=merges, **more)


def check(path, wanted, texts=TEXTS, decode=True):
    """The file's ids, and texts back from them, are those of `wanted` (a Rust tokenizer)."""
    tokenizer = tokenizers.Tokenizer.from_str(GGUFLoader(path).tokenizer().tokenizer)
    for special in (False, True):
        for text in texts:
            ids = wanted.encode(text, add_special_tokens=special).ids
            assert tokenizer.encode(text, add_special_tokens=special).ids == ids, (text, special)
            if decode:
                assert tokenizer.decode(ids) == wanted.decode(ids), text


@pytest.mark.parametrize("pre", PIECES)
def test_byte_pairs(tmp_path, pre):
    core = original(pre)
    check(pairs(core, tmp_path / "m.gguf", pre=pre, add_bos_token=False), core)


def test_qwen2_composes_characters(tmp_path):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    untrained = Qwen2Tokenizer(vocab={c: i for i, c in enumerate(sorted(alphabet))}, merges=[])
    trained = untrained.train_new_from_iterator(CORPUS * 3, 400)
    core = trained.backend_tokenizer
    check(pairs(core, tmp_path / "m.gguf", pre="qwen2"), core)


def test_llama_3_begins_with_a_token(tmp_path):
    core = original("llama-bpe")
    table = json.loads(core.to_str())
    begin = table["added_tokens"][0]
    core.post_processor = tokenizers.processors.TemplateProcessing(
        "<|begin|> $A", "<|begin|> $A <|begin|> $B:1", [(begin["content"], begin["id"])]
    )
    check(pairs(core, tmp_path / "m.gguf", pre="llama-bpe", bos_token_id=0), core)


def sentence_pieces(size=400):
    """Pieces with scores, as SentencePiece's byte pairs have them: later merges score less."""
    core = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    # Merges stay within words, as that trainer has it.
    core.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    plain = [line for line in CORPUS if "\n" not in line]
    core.train_from_iterator(
        plain * 3,
        trainers.BpeTrainer(
            vocab_size=size + 256, special_tokens=special, limit_alphabet=90, show_progress=False
        ),
    )
    table = json.loads(core.to_str())["model"]
    tokens = by_id(core.get_vocab())
    merged = ["".join(pair) for pair in table["merges"]]
    rank = {token: -float(i) for i, token in enumerate(dict.fromkeys(merged))}
    scores = [rank.get(token, -1e4 - i) for i, token in enumerate(tokens)]
    kinds = [KIND.UNKNOWN, *[KIND.CONTROL] * 2, *[KIND.BYTE] * 256]
    kinds += [KIND.NORMAL] * (len(tokens) - len(kinds))
    return tokens, scores, kinds, [tuple(merge) for merge in table["merges"]]


def test_sentence_piece_of_llama(tmp_path):
    tokens, scores, kinds, merges = sentence_pieces()
    vocabulary = {token: i for i, token in enumerate(tokens)}
    wanted = LlamaTokenizer(vocab=vocabulary, merges=merges, legacy=True, add_bos_token=True)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    path = write(tmp_path / "m.gguf", "llama", tokens, kinds, scores=scores, **ids)
    # Before a blank that begins a text the class puts none; the published files do.
    texts = [text.replace("<|begin|>", "<s>") for text in TEXTS if text.strip(" ") == text != ""]
    check(path, wanted.backend_tokenizer, texts, decode=False)
    tokenizer = tokenizers.Tokenizer.from_str(GGUFLoader(path).tokenizer().tokenizer)
    for text in CORPUS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_sentence_piece_of_gemma(tmp_path):
    """Without a blank in front, and with tokens of text that are found before all else."""
    tokens, scores, kinds, merges = sentence_pieces()
    tokens, scores = [*tokens, "\n\n", "<b>"], [*scores, 0.0, 0.0]
    kinds = [*kinds, KIND.USER_DEFINED, KIND.USER_DEFINED]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    wanted = GemmaTokenizer(vocab=vocabulary, merges=merges, **names)
    extra = [tokenizers.AddedToken(t, normalized=False) for t in ("\n\n", "<b>")]
    wanted.backend_tokenizer.add_tokens(extra)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    path = write(
        tmp_path / "m.gguf", "llama", tokens, kinds, scores=scores, add_space_prefix=False, **ids
    )
    tokenizer = tokenizers.Tokenizer.from_str(GGUFLoader(path).tokenizer().tokenizer)
    for text in [*CORPUS, "a\n\nb <b>c", "  two"]:
        ids = wanted.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        assert tokenizer.encode(text).ids == [1, *ids]
        assert tokenizer.decode(ids) == text


def test_unigram(tmp_path):
    core = tokenizers.Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    core.train_from_iterator(
        CORPUS * 5,
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
        ),
    )
    pieces = [tuple(entry) for entry in json.loads(core.to_str())["model"]["vocab"]]
    wanted = T5Tokenizer(vocab=pieces, extra_ids=0, pad_token="<pad>")
    tokens, scores = zip(*pieces, strict=True)
    kinds = [KIND.CONTROL, KIND.CONTROL, KIND.UNKNOWN] + [KIND.NORMAL] * (len(tokens) - 3)
    ids = {"padding_token_id": 0, "eos_token_id": 1, "unknown_token_id": 2}
    more = {"scores": list(scores), "remove_extra_whitespaces": True, **ids}
    path = write(tmp_path / "m.gguf", "t5", list(tokens), kinds, **more)
    plain = [text for text in TEXTS if text.strip() and "<|" not in text]
    check(path, wanted.backend_tokenizer, plain, decode=False)


def test_word_pieces(tmp_path):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    core = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    core.train_from_iterator(CORPUS * 3, trainer)
    vocabulary = core.get_vocab()
    wanted = BertTokenizer(vocab=vocabulary)
    tokens = by_id(vocabulary)
    written = [
        t if t in special else t[2:] if t.startswith("##") and len(t) > 2 else f"▁{t}"
        for t in tokens
    ]
    kinds = [KIND.CONTROL if t in special else KIND.NORMAL for t in tokens]
    ids = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3, "padding_token_id": 0}
    path = write(tmp_path / "m.gguf", "bert", written, kinds, **ids)
    check(path, wanted.backend_tokenizer)
    tokenizer = tokenizers.Tokenizer.from_str(GGUFLoader(path).tokenizer().tokenizer)
    two = [t.encode("one two", "three") for t in (tokenizer, wanted.backend_tokenizer)]
    assert two[0].ids == two[1].ids
    assert two[0].type_ids == two[1].type_ids


def test_templates_and_special_tokens(tmp_path):
    core = original("gpt-2")
    path = pairs(core, tmp_path / "m.gguf", pre="gpt-2", bos_token_id=0, eos_token_id=1)
    writer = open_model(path)
    writer.metadata["tokenizer.chat_template"] = "{{ messages }}"
    writer.metadata["tokenizer.chat_template.tool_use"] = "{{ tools }}"
    stored = GGUFLoader(path).tokenizer()
    assert stored.settings["chat_template"] == {
        "default": "{{ messages }}", "tool_use": "{{ tools }}",
    }  # fmt: skip
    assert stored.settings["bos_token"] == "<|begin|>"
    assert GGUFLoader(path).generation_configuration() == {"eos_token_id": [1]}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pre": "none-such"}, r"tokenizer\.ggml\.pre: 'none-such' is not supported yet"),
        ({"merges": ["a"]}, "merges: number 0, 'a', is not a pair of tokens"),
        ({"merges": ["a zz"]}, "merges: number 0, 'a zz', is not a pair"),
        ({"bos_token_id": 10**6}, "bos_token_id: 1000000 is not a token id"),
    ],
)
def test_a_spoilt_vocabulary_is_named(tmp_path, more, message):
    keys = {"pre": "gpt-2", "merges": ["a b"], **more}
    path = write(tmp_path / "m.gguf", "gpt2", ["a", "b", "ab"], [KIND.NORMAL] * 3, **keys)
    with pytest.raises(CheckpointError, match=message):
        GGUFLoader(path).tokenizer()


def test_a_vocabulary_without_types_or_with_too_few_scores(tmp_path):
    path = write(tmp_path / "m.gguf", "llama", ["a", "b"], [KIND.NORMAL] * 2, scores=[0.5])
    with pytest.raises(CheckpointError, match="scores: must have a number for each of the 2"):
        GGUFLoader(path).tokenizer()
