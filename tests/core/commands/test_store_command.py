"""`terakoya store import|merge|split|sample|export-blocks|import-blocks` on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from terakoya.commands.main import build_app
from terakoya.errors import UserError
from terakoya.store.token_store import TokenStore
from terakoya_checks.verify_store import verify
from terakoya_megatron.commands.store_import import parse_eos
from terakoya_stores.commands.merge import parse_weights

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "寺子", "屋", "で", "読み", "##書き", "を", "学", "##ぶ"]
PIECES += [
    "東京",
    "。",
    "the",
    "quick",
    "##ly",
    "foxes",
    "猫",
    "は",
    "ある",
    "吾輩",
    "##輩",
    "吾",
    "名前",
    "無い",
    "記",
    "##憶",
]
TEXT = "寺子屋で読み書きを学ぶ。\n吾輩は猫である。名前は無い。"


def typed(*arguments: object) -> str:
    """Runs the command and returns its output; raises its errors."""
    result = CliRunner().invoke(build_app(), [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of MeCab words and a store made with it."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    config = {
        "tokenizer_class": "BertJapaneseTokenizer",
        "word_tokenizer_type": "mecab",
        "subword_tokenizer_type": "wordpiece",
        "mecab_kwargs": {"mecab_dic": "unidic_lite"},
        "do_lower_case": False,
    }
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    rows = [json.dumps({"text": TEXT * (1 + n % 3) + "猫" * (n % 7)}) for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    typed("prepare", tmp_path / "a.jsonl", "--tokenizer", tokenizer, "--out", tmp_path / "store", "--processes", 1)
    return tmp_path


def test_a_store_without_store_json_is_imported_with_word_starts(folder: Path) -> None:
    for suffix in ("bin", "idx"):
        shutil.copy(folder / "store" / f"tokens.{suffix}", folder / f"text_document.{suffix}")
    out = folder / "imported"
    printed = typed("store", "import", folder / "text_document", "--tokenizer", folder / "tokenizer", "--out", out)
    assert "60 documents" in printed and "word starts rebuilt from the pieces" in printed
    assert TokenStore.open(out).facts.fingerprint == TokenStore.open(folder / "store").facts.fingerprint
    for name in ("tokens.bin", "tokens.idx", "tokens.words", "tokenizer/vocab.txt"):
        assert (out / name).read_bytes() == (folder / "store" / name).read_bytes(), name
    printed = typed(
        *("store", "import", folder / "text_document.idx", "--tokenizer", folder / "tokenizer"),
        *("--out", folder / "plain", "--no-word-starts", "--eos", "none"),
    )
    assert "word starts not known" in printed and not TokenStore.open(folder / "plain").facts.word_starts


def test_shards_are_merged_into_the_store_and_split_again(folder: Path) -> None:
    text = (folder / "a.jsonl").read_text().split("\n")
    files = [folder / f"{number}.jsonl" for number in range(3)]
    for number, file in enumerate(files):
        file.write_text("\n".join(text[number::3]))
    prepare = ["prepare", *files, "--tokenizer", folder / "tokenizer", "--processes", 1]
    typed(*prepare, "--out", folder / "whole")
    shards = [folder / f"s{number}" for number in (1, 2)]
    for number, shard in enumerate(shards, 1):
        typed(*prepare, "--out", shard, "--shard", f"{number}/2")
    printed = typed("store", "merge", *shards, "--out", folder / "merged")
    assert f"{folder / 'merged'}: 60 documents" in printed
    for name in ("tokens.bin", "tokens.idx", "tokens.words", "store.json"):
        assert (folder / "merged" / name).read_bytes() == (folder / "whole" / name).read_bytes(), name
    outs = ["--out", folder / "train", "--out", folder / "valid"]
    typed("store", "split", folder / "merged", "--parts", "3,1", *outs)
    train, valid, merged = (TokenStore.open(folder / name).facts for name in ("train", "valid", "merged"))
    assert train.documents + valid.documents == 60 and train.tokens + valid.tokens == merged.tokens
    assert verify(folder / "train") == verify(folder / "valid") == []


def test_a_sample_shows_borders_and_masks(folder: Path) -> None:
    shown = typed("store", "sample", folder / "store", "--rows", 2, "--tokens", 12).split("\n")
    assert shown[0].startswith("寺子|屋|で|読み/書き|を|学/ぶ|。|") and shown[2].startswith("next: ")
    masked = typed("store", "sample", folder / "store", "--rows", 2, "--masks", "--sequence-length", 32)
    assert masked.startswith("[CLS]|") and masked.count("[CLS]") == 2 and "→[MASK]]" in masked
    assert "[読み→[MASK]]/書き" not in masked
    causal = ("store", "sample", folder / "store", "--causal", "--sequence-length", 32)
    assert "‖寺子|屋|で|" in typed(*causal)
    assert typed(*causal, "--set", "layout=stream").startswith("‖寺子|屋|で|")
    with pytest.raises(UserError, match='--set: layout: expected "packed", "stream" or "megatron", got "strem"'):
        typed(*causal, "--set", "layout=strem")
    with pytest.raises(UserError, match="--masks and --causal: expected one of them"):
        typed(*causal, "--masks")
    shutil.rmtree(folder / "store" / "tokenizer")
    with pytest.raises(UserError, match=r"store/tokenizer/\S+: no such file"):
        typed("store", "sample", folder / "store")


def test_exported_blocks_can_be_imported(folder: Path) -> None:
    blocks, tokens = folder / "train" / "blocks.jsonl", TokenStore.open(folder / "store").facts.tokens
    printed = typed("store", "export-blocks", folder / "store", "--out", blocks, "--block-size", 64)
    assert f"{tokens // 64} blocks of 64 tokens; the last {tokens % 64} tokens were dropped" in printed
    back = folder / "back"
    printed = typed("store", "import-blocks", blocks.parent, "--tokenizer", folder / "tokenizer", "--out", back)
    assert f"{tokens // 64} blocks, {tokens // 64 * 64:,} tokens; word starts rebuilt" in printed
    assert TokenStore.open(back).facts.word_starts
    whole = (folder / "store" / "tokens.bin").read_bytes()
    assert (back / "tokens.bin").read_bytes() == whole[: 2 * (tokens // 64 * 64)]


def test_options_are_read_or_refused() -> None:
    assert (parse_eos("find"), parse_eos("none"), parse_eos("7")) == ("find", None, 7)
    assert parse_weights("998, 1,1") == [998, 1, 1]
    with pytest.raises(UserError, match='--eos: expected an id, "find" or "none", got "-1"'):
        parse_eos("-1")
    with pytest.raises(UserError, match=r'--parts: expected weights such as 998,1,1, got "0\.5,0\.5"'):
        parse_weights("0.5,0.5")
