"""`modulm config`, beside what tests/cli asks of it."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from modulm.testing.checkpoints import make_tiny
from modulm_command_config.command import command as config


def test_explain_knows_the_length_that_pooling_files_name(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, architecture="BertModel")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24}))
    done = CliRunner().invoke(config, ["explain", str(folder), "--device", "cpu", "--json"])
    rows = {row["flag"]: row for row in json.loads(done.stdout)}
    assert rows["max_model_len"]["value"] == "24"


def test_show_names_every_wrong_flag() -> None:
    wrong = ["--dtype", "float33", "--block-size", "-1", "--max-num-seqs", "many"]
    done = CliRunner().invoke(config, ["show", "demo", *wrong])
    assert done.exit_code != 0
    for name in ("--dtype", "--block-size", "--max-num-seqs"):
        assert name in done.output
