"""Engines in turns: what is measured, who is left out, and that no process outlives the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
CONFIG = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 4, "intermediate_size": 16, "vocab_size": 32,
}  # fmt: skip
#: A peer's script whose cases have these figures, one after the other.
PEER = """
import os, subprocess, sys, time
sys.path.insert(0, {peers!r})
import cases
figures = iter({figures!r})
def figure(generate, prompts):
    {body}
    return next(figures)
def load(checkpoint, weights):
    {load}
    return lambda case: lambda prompts, new: print("loud")
cases.CASES = dict.fromkeys(cases.CASES, figure)
cases.main(load)
"""
PROBE = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    print(json.dumps({"read": 1e-6, "gemm": 1e9}), flush=True)
"""


@pytest.fixture
def compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench_script: Callable[[str], ModuleType]
) -> ModuleType:
    """The script, with fake peers in `tmp_path`, where the checkpoint is, too."""
    script = bench_script("compare")
    monkeypatch.setattr(script, "PEERS", tmp_path)
    monkeypatch.setattr(script, "raise_on_termination", lambda: None)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "probe_peer.py").write_text(PROBE)
    return script


def write_peer(
    folder: Path, name: str, *figures: float, body: str = "pass", load: str = "pass"
) -> None:
    text = PEER.format(peers=str(BENCH / "peers"), figures=figures, body=body, load=load)
    (folder / f"{name}_peer.py").write_text(text)


def run(compare: ModuleType, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the rows of the JSON file."""
    rows = folder / "rows.json"
    command = ["compare.py", str(folder), "--weights", "bf16", "--rounds", "3", "--case", "decode"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*command, "--json", str(rows), *arguments])
        compare.main()
    found: list[dict[str, Any]] = json.loads(rows.read_text())
    return found


def test_ratios_are_of_rounds(compare: ModuleType, tmp_path: Path, capsys: Any) -> None:
    write_peer(tmp_path, "modulm", 100, 4, 9, 8)  # the first round is a warm-up
    write_peer(tmp_path, "other", 1, 2, 3, 1)
    (row,) = run(compare, tmp_path, "--peer", "other")
    assert row["figures"] == {"modulm": [6, 8, 8.5], "other": [1.5, 2, 2.5]}
    assert row["ratios"] == {"other": [2.5, 3, 5.5]}
    # 2 layers of 576 weights and a head of 256, at 1,000 bytes per second.
    assert row["fraction"][1] == pytest.approx(8 / (1000 / (2 * (2 * 576 + 256))))
    assert [len(one["peaks"]) for one in row["rounds"]] == [2, 2, 2]
    printed = capsys.readouterr().out
    assert "| 8 (6 to 8.5) |" in printed
    assert "| 2 (1.5 to 2.5): **3** (2.5 to 5.5) |" in printed


def test_an_engine_that_ends_is_left_out(compare: ModuleType, tmp_path: Path, capsys: Any) -> None:
    write_peer(tmp_path, "modulm", *[6] * 8)
    write_peer(tmp_path, "other", *[2] * 8)
    end = "os.write(2, b'no more memory\\n'); os._exit(3)"
    write_peer(tmp_path, "dying", body=end)
    rows = run(compare, tmp_path, "--peer", "dying", "--peer", "other", "--case", "streams")
    assert [row["ratios"] for row in rows] == [{"other": [3, 3, 3]}] * 2
    assert capsys.readouterr().out.count("dying, bf16: no more memory\n") == 1


def test_what_an_engine_refuses_is_left_out(
    compare: ModuleType, tmp_path: Path, capsys: Any
) -> None:
    write_peer(tmp_path, "modulm", *[6] * 8)
    write_peer(tmp_path, "without", load="raise SystemExit('no bf16 here')")
    write_peer(tmp_path, "once", 1)
    rows = run(compare, tmp_path, "--peer", "without", "--peer", "once")
    assert rows[0]["ratios"] == {}
    printed = capsys.readouterr().out
    assert "without, bf16: no bf16 here\n" in printed
    assert "once, bf16, decode: StopIteration: \n" in printed


def test_without_modulm_peers_are_measured(compare: ModuleType, tmp_path: Path) -> None:
    write_peer(tmp_path, "modulm", load="raise ValueError('broken')")
    write_peer(tmp_path, "other", *[2] * 4)
    (row,) = run(compare, tmp_path, "--peer", "other")
    assert (row["figures"], row["ratios"]) == ({"other": [2, 2, 2]}, {})


def test_engines_that_exceed_the_memory_are_measured_in_pairs(
    compare: ModuleType, tmp_path: Path
) -> None:
    write_peer(tmp_path, "modulm", *[6] * 8)
    for name, figure in (("first", 2), ("second", 3)):
        write_peer(tmp_path, name, *[figure] * 4)
    rows = run(compare, tmp_path, "--peer", "first", "--peer", "second", "--memory", "0")
    assert [row["ratios"] for row in rows] == [{"first": [3, 3, 3]}, {"second": [2, 2, 2]}]


def test_an_engine_has_limited_time(bench_script: Callable[[str], ModuleType]) -> None:
    engines = bench_script("engines")
    code = "import time; print('{}', flush=True); time.sleep(1000)"
    engine = engines.Engine([sys.executable, "-c", code], 60)
    with pytest.raises(engines.EngineFault, match="no answer after 0.01 s"):
        engine.ask({"case": "decode"}, 0.01)
    engine.close()
    assert not alive(engine._process.pid)


def test_idle_engines_are_stopped(bench_script: Callable[[str], ModuleType]) -> None:
    engines = bench_script("engines")
    code = "import sys; print('{}', flush=True); [print('{}', flush=True) for _ in sys.stdin]"
    engine = engines.Engine([sys.executable, "-c", code], 60)
    for _ in range(2):
        _, status = os.waitpid(engine._process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert engine.ask({}, 60) == {}
    assert engine.resident() > 1 << 20
    engine.close()


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_process_outlives_an_interrupted_run(
    compare: ModuleType, tmp_path: Path, number: signal.Signals
) -> None:
    """Each engine has a child. The last one waits for ever when it is asked."""
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])"
    note = "open({file!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')"
    load = f"child = {child}; " + note
    for name in ("modulm", "idle", "busy"):
        wait = f"open({str(tmp_path / 'asked')!r}, 'w'); time.sleep(1000)"
        write_peer(
            tmp_path, name, 1, 1, load=load.format(file=str(tmp_path / f"{name}.pids")),
            body=wait if name == "busy" else "pass",
        )  # fmt: skip
    code = (
        "import compare, pathlib, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background\n"
        f"compare.PEERS = pathlib.Path({str(tmp_path)!r})\n"
        "compare.main()"
    )
    command = [sys.executable, "-c", code, str(tmp_path), "--weights", "bf16", "--case", "decode"]
    process = subprocess.Popen(
        [*command, "--peer", "idle", "--peer", "busy"],
        cwd=BENCH, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    until((tmp_path / "asked").exists)
    process.send_signal(number)
    process.wait()
    pids = {
        name: [int(pid) for pid in (tmp_path / f"{name}.pids").read_text().split()]
        for name in ("modulm", "idle", "busy")
    }
    until(lambda: not any(alive(pid) for each in pids.values() for pid in each))
