"""`terakoya prepare` and `terakoya store` on the command line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from word_tokenizer import PLUGIN, make_folder

from terakoya.errors import UserError
from terakoya.plugins.verb_options import options_of
from terakoya.preparation.options import PrepareOptions, parse_max_rejects
from terakoya.store.token_store import TokenStore, count_store
from terakoya_checks.verify_store import verify

DOUBLE = Path(__file__).parents[2] / "helpers"


def terakoya(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "from terakoya.commands.main import main; main()"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(DOUBLE), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plugin_words.py").write_text(PLUGIN)
    make_folder(tmp_path / "tokenizer")
    rows = [json.dumps({"body": f"word{n} [MASK] and more\nsecond line"}) for n in range(99)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, "{"]))
    return tmp_path


def test_prepare_with_a_plugin_in_two_processes_then_inspect_the_store(folder: Path, forks: None) -> None:
    store = folder / "store"
    inspect = partial(terakoya, "store")
    prepare = ["--plugin", folder / "plugin_words.py", "prepare", folder / "a.jsonl", "--out", store]
    prepare += ["--tokenizer", folder / "tokenizer", "--field", "body", "--unit", "line", "--append-eos"]
    failed = terakoya(*prepare, "--processes", 1, "--max-rejects", "0")
    assert failed.returncode == 2 and "Traceback" not in failed.stderr
    assert "expected at most 0 rejected documents (--max-rejects 0), got 1 of 100 documents" in failed.stderr
    done = terakoya(*prepare, "--processes", 2, "--max-rejects", "1%")
    assert done.returncode == 0, done.stderr
    assert "99 documents, 198 sequences" in done.stdout and "1 document rejected" in done.stdout
    assert "disk needed" in done.stderr and "[MASK] 99 times" in done.stderr
    again = terakoya(*prepare, "--processes", 1)
    assert again.returncode == 0 and "nothing to do" in again.stderr

    facts = TokenStore.open(store).facts
    assert facts.eos == 5 and facts.unit == "line" and facts.options["field"] == "body"
    assert not (store / "tokenizer" / "model.safetensors").exists()
    counts = count_store(store)
    assert (counts.documents, counts.sequences, counts.tokens) == (99, 198, facts.tokens)
    shown = inspect("info", store)
    assert f"{facts.tokens:,} uint16" in shown.stdout and "literal [MASK]" in shown.stdout
    assert json.loads(inspect("info", store, "--json").stdout)["tokens"] == facts.tokens
    assert inspect("count", store).stdout.split() == [
        "documents", "99", "sequences", "198", "tokens", str(facts.tokens),
    ]  # fmt: skip
    table = inspect("count", store, store).stdout.splitlines()
    assert table[0].split() == ["store", "documents", "sequences", "tokens"]
    assert [line.split()[1:] for line in table[1:]] == [["99", "198", f"{facts.tokens:,}"]] * 2
    assert verify(store) == [] and "sound" in inspect("verify", store).stdout

    content = bytearray((store / "tokens.bin").read_bytes())
    content[1] = 0xFF
    (store / "tokens.bin").write_bytes(content)
    damaged = inspect("verify", store)
    assert damaged.returncode == 2 and "content changed" in damaged.stdout
    assert "listed above" in damaged.stderr and "sound" not in damaged.stdout
    (store / "tokens.bin").write_bytes(content[:-2])
    short = inspect("count", store)
    assert short.returncode == 2 and "tokens.bin: expected" in short.stderr and not short.stdout


def test_an_unknown_tokenizer_folder_is_explained(folder: Path, forks: None) -> None:
    (folder / "tokenizer" / "size.txt").unlink()
    failed = terakoya(
        "prepare", folder / "a.jsonl", "--tokenizer", folder / "tokenizer", "--out", folder / "out", "--processes", 1
    )
    assert failed.returncode == 2
    assert "got a folder with model.safetensors that none of them reads" in failed.stderr
    assert not (folder / "out").exists()


def test_every_field_is_an_option_of_the_command() -> None:
    assert list(options_of(PrepareOptions)) == [field.name for field in dataclasses.fields(PrepareOptions)]


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("100", 100), ("0.05", 0.05), ("5%", 0.05), ("1.0", 1.0)])
def test_max_rejects_is_a_count_or_a_share(text: str, value: int | float) -> None:
    parsed = parse_max_rejects(text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize("text", ["-1", "1.5", "101%", "many", "nan"])
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--max-rejects: expected a count"):
        parse_max_rejects(text)
