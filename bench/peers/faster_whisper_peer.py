"""faster-whisper's parts on a CPU, for `bench/whisper.py`: its features, and CTranslate2's Whisper.

    pip install faster-whisper transformers torch
    python bench/peers/faster_whisper_peer.py CHECKPOINT SOUNDS.npz TOKENS RUNS [TYPE]

SOUNDS.npz holds arrays of samples at 16 kHz. Each is answered with TOKENS tokens in one batch; the
end of a text is suppressed, and CTranslate2 generates up to half of `max_length`. Weights of TYPE,
int8 by default, are converted beside the checkpoint.
Prints JSON: seconds of the fastest run after a warm-up.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

_BEGUN = [1, 5, 6, 7]


def main() -> None:
    import ctranslate2
    from faster_whisper.feature_extractor import FeatureExtractor

    checkpoint, arrays, tokens, runs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    kind = sys.argv[5] if len(sys.argv) > 5 else "int8"
    folder = Path(checkpoint) / f"ctranslate2-{kind}"
    if not folder.exists():
        converter = ctranslate2.converters.TransformersConverter(checkpoint)
        converter.convert(str(folder), quantization=kind)
        # The test tokenizer has no tokens of Whisper's, which CTranslate2 looks for in prompts.
        file = folder / "vocabulary.json"
        words = json.loads(file.read_text())
        words[_BEGUN[0]], words[_BEGUN[-1]] = "<|startoftranscript|>", "<|notimestamps|>"
        file.write_text(json.dumps(words))
    with np.load(arrays) as stored:
        sounds = [stored[name] for name in stored.files]
    model = ctranslate2.models.Whisper(str(folder), device="cpu", compute_type=kind)
    extract = FeatureExtractor()

    def run() -> float:
        began = time.perf_counter()
        mel = np.stack([extract(sound, padding=480_000)[:, :3000] for sound in sounds])
        features = ctranslate2.StorageView.from_array(np.ascontiguousarray(mel, np.float32))
        answers = model.generate(
            features, [_BEGUN] * len(sounds), beam_size=1, max_length=2 * max(tokens, len(_BEGUN)),
            suppress_tokens=[0, 2], suppress_blank=False,
        )  # fmt: skip
        counts = {len(answer.sequences_ids[0]) for answer in answers}
        if counts != {tokens}:
            raise SystemExit(f"answers have {counts} tokens, not {tokens}")
        return time.perf_counter() - began

    run()
    print(json.dumps({"seconds": min(run() for _ in range(runs)), "type": kind}))


if __name__ == "__main__":
    main()
