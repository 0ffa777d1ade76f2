"""The byte-level BPE tokenizer, trained on generated text.

A capital letter or digit is never merged with the space before it, so a name or a number has the
same tokens after a space and after a quote, which makes copying easy.
"""

import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .example import Example
from .generator import training

VOCABULARY = 4096
CONTEXT = 2048
_HIDDEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VISIBLE = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
            "</tool_response>")  # fmt: skip
_PIECES = r" ?\p{Ll}+|\p{Lu}\p{Ll}*|\p{L}+|\p{N}|(?: ?[^\s\p{L}\p{N}])+|\n+| +|\s"
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def _wrap(core: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=_TEMPLATE.read_text(), model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def render(tokenizer: PreTrainedTokenizerFast, example: Example) -> str:
    """Render a whole conversation, including the answer, with the chat template."""
    return tokenizer.apply_chat_template(
        list(example.messages), tools=list(example.tools) or None, tokenize=False,
        enable_thinking=example.thinking,
    )  # fmt: skip


def train_tokenizer(
    seed: int, count: int = 30_000, mixture: str = "second"
) -> PreTrainedTokenizerFast:
    """Learn the merges from the first conversations of a seed."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    core.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in _HIDDEN]
    plain = [AddedToken(text, special=False, normalized=False) for text in _VISIBLE]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(plain), special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=4,
    )  # fmt: skip
    writer = _wrap(Tokenizer(models.BPE()))
    texts = (render(writer, e) for e in itertools.islice(training(seed, mixture), count))
    core.train_from_iterator(texts, trainer)
    core.add_tokens(plain)
    return _wrap(core)


def store(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save the tokenizer under a class name that transformers 4 knows too."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    for key in ("backend", "is_local", "local_files_only"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(settings, indent=2) + "\n")
