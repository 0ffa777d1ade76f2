"""An engine with files behind its cache that kills itself while it saves or loads blocks.

Run as `python killed_engine.py MODEL FLAGS MOMENT`; flags are JSON. SIGKILL comes at the line that
is executed MOMENT-th of those that move blocks. With 0, the number of these lines is printed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from modulm import LLM, SamplingParams

#: Files of the packages that move blocks.
_TRACED = ("modulm_kv_transfer/copies.py", "modulm_kv_transfer/block_files.py", "modulm_kv_disk/")


class Killer:
    """Counts lines in all threads and kills the process at one of them."""

    def __init__(self, moment: int) -> None:
        self.count, self._moment, self._lock = 0, moment, threading.Lock()

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not any(name in frame.f_code.co_filename for name in _TRACED):
            return None
        if event == "line":
            with self._lock:
                self.count += 1
                if self.count == self._moment:
                    os.kill(os.getpid(), signal.SIGKILL)
        return self.trace


def main() -> None:
    model, flags, moment = sys.argv[1:]
    prompts = [{"prompt_token_ids": [5 + i, 9, 40, 7] * 12} for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    killer = Killer(int(moment))
    threading.settrace(killer.trace)
    with LLM(model, **json.loads(flags)) as llm:
        for _ in range(2):
            llm.generate(prompts, params, use_tqdm=False)
            while llm._core.loop.tick():
                pass
            llm.reset_prefix_cache()
    print("lines", killer.count)


if __name__ == "__main__":
    main()
