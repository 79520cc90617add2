"""A store of conversations has the same bytes for any number of processes, and every copy keeps its answers."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from chat_tokenizer import CHATML, MESSAGES, WITH_INPUT, make_chat_tokenizer, write_lines
from command_line import refusal
from small_store import damage
from transformers import AutoTokenizer
from typer.testing import CliRunner

from terakoya.commands.main import build_app
from terakoya.errors import UserError
from terakoya.preparation.prepare import prepare
from terakoya.store.token_store import StoreFacts, TokenStore
from terakoya_checks.verify_store import verify
from terakoya_conversations.encoder import UNLIKE_PROMPT
from terakoya_megatron.token_blocks import export_blocks
from terakoya_stores.merge import merge
from terakoya_stores.split import split

FILES = ("tokens.bin", "tokens.idx", "tokens.answers", "store.json", "rejects.jsonl", "tokenizer/chat_template.jinja")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_tokenizer(tmp_path_factory.mktemp("stores") / "tokenizer")


def conversations(file: Path, *, count: int = 40, first: int = 0) -> Path:
    """Writes `count` different conversations and one line that is not a conversation."""
    records = [
        {**WITH_INPUT, "output": f"{number}番の空"}
        if number % 3
        else {"messages": [*MESSAGES[:3], {"role": "assistant", "content": f"約{number}人"}]}
        for number in range(first, first + count)
    ]
    return write_lines(file, *records[:5], {"text": "文"}, *records[5:])


def make(file: Path, tokenizer: Path, out: Path, **options: Any) -> StoreFacts:
    """Prepares conversations, in one process unless `options` say otherwise."""
    return prepare(
        [file], tokenizer=tokenizer, out=out, **{"conversations": True, "processes": 1, "max_rejects": 1, **options}
    )


@pytest.fixture
def store(tokenizer: Path, tmp_path: Path) -> TokenStore:
    file = conversations(tmp_path / "a.jsonl")
    make(file, tokenizer, tmp_path / "store")
    return TokenStore.open(tmp_path / "store")


def learnt(store: TokenStore) -> list[str]:
    """Returns the answers of each conversation as text."""
    loaded = AutoTokenizer.from_pretrained(store.tokenizer_folder)
    bounds = store.offsets[store.documents]
    return [
        loaded.decode(store.tokens[start:stop][store.read_learned(start, stop)]) for start, stop in pairwise(bounds)
    ]


def test_bytes_do_not_depend_on_processes_and_a_second_call_finds_the_store(
    store: TokenStore, tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    facts = prepare(
        [tmp_path / "a.jsonl"],
        tokenizer=tokenizer,
        out=tmp_path / "two",
        conversations=True,
        processes=2,
        max_rejects=1,
    )
    for name in FILES:
        assert (tmp_path / "two" / name).read_bytes() == (store.folder / name).read_bytes(), name
    assert facts.answers and facts.rejected_by_reason == {"not a conversation": 1} and verify(tmp_path / "two") == []
    expected = [f"{n}番の空</s>" if n % 3 else f"東京です。</s>約{n}人</s>" for n in range(40)]
    assert learnt(store) == expected
    with caplog.at_level(logging.INFO, "terakoya"):
        make(tmp_path / "a.jsonl", tokenizer, tmp_path / "two")
    assert "is finished already" in caplog.text
    with pytest.raises(UserError, match=r"tokenizer chat template.*template: was 'alpaca', is now 'alpaca_en'"):
        make(tmp_path / "a.jsonl", tokenizer, tmp_path / "two", template="alpaca_en")


def test_the_template_is_stored_with_the_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
    """It takes precedence over the tokenizer's own template and needs no setting."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.chat_template = CHATML
    loaded.save_pretrained(tmp_path / "own", save_jinja_files=False)
    assert not (tmp_path / "own" / "chat_template.jinja").exists()
    file = conversations(tmp_path / "a.jsonl", count=6)
    for template in (None, "alpaca"):
        out = tmp_path / str(template)
        make(file, tmp_path / "own", out, template=template)
        found, made = TokenStore.open(out), AutoTokenizer.from_pretrained(out / "tokenizer")
        ids = made.apply_chat_template([*MESSAGES[:3], {"role": "assistant", "content": "約0人"}], return_dict=False)
        assert found.tokens[: found.offsets[1]].tolist() == ids
        assert made.chat_template == (out / "tokenizer" / "chat_template.jinja").read_text(encoding="utf-8")
        assert (made.chat_template == CHATML) == (template is None)
        assert found.facts.options["template"] == ("chat" if template is None else "alpaca")


def test_keys_that_are_not_read_are_told_with_a_count(
    tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turns = [{**MESSAGES[0], "name": "x"}, MESSAGES[1], {**MESSAGES[2], "name": "y"}, {**MESSAGES[3], "weight": 0}]
    called = {**MESSAGES[1], "content": None, "tool_calls": [{"name": "f"}]}
    records = [{"messages": turns, "id": 1}, {**WITH_INPUT, "mystery": 1}, {"messages": [MESSAGES[0], called]}]
    facts = make(write_lines(tmp_path / "a.jsonl", *records), tokenizer, tmp_path / "store")
    assert "how many conversations have them: messages[].name (1), mystery (1)" in caplog.text
    assert facts.rejected_by_reason == {"tools and their calls": 1}
    assert learnt(TokenStore.open(tmp_path / "store")) == ["東京です。</s>", "空と海は青い。</s>"]
    with pytest.raises(UserError, match=r"tools and their calls[\s\S]*write it into the content in the form"):
        make(tmp_path / "a.jsonl", tokenizer, tmp_path / "strict", max_rejects=0)


def test_stores_made_of_stores_keep_answers(store: TokenStore, tokenizer: Path, tmp_path: Path) -> None:
    whole = learnt(store)
    split(store.folder, [tmp_path / "x", tmp_path / "y"], weights=[3, 1], seed=3)
    sides = [TokenStore.open(tmp_path / name) for name in "xy"]
    assert sorted(learnt(sides[0]) + learnt(sides[1])) == sorted(whole) and all(learnt(side) for side in sides)
    merge([tmp_path / "x", tmp_path / "y"], tmp_path / "merged")
    assert learnt(TokenStore.open(tmp_path / "merged")) == learnt(sides[0]) + learnt(sides[1])


def test_merged_shards_are_the_store_of_one_run(
    store: TokenStore, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terakoya.preparation.job._MIN_BLOCK", 700)
    whole, file = tmp_path / "whole", tmp_path / "a.jsonl"
    shards = [tmp_path / f"shard{number}" for number in (1, 2)]
    make(file, tokenizer, whole)
    documents = [make(file, tokenizer, shard, shard=f"{n}/2").documents for n, shard in enumerate(shards, 1)]
    assert min(documents) > 0
    merge(shards, tmp_path / "merged")
    for name in FILES:
        assert (tmp_path / "merged" / name).read_bytes() == (whole / name).read_bytes(), name
    assert (whole / "tokens.answers").read_bytes() == (store.folder / "tokens.answers").read_bytes()


def test_incompatible_stores_are_refused(store: TokenStore, tokenizer: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "plain.jsonl", {"text": "文"})
    make(tmp_path / "plain.jsonl", tokenizer, tmp_path / "plain", conversations=False)
    assert not TokenStore.open(tmp_path / "plain").facts.answers
    with pytest.raises(UserError, match="answers: expected marked as in"):
        merge([store.folder, tmp_path / "plain"], tmp_path / "merged")
    other = conversations(tmp_path / "b.jsonl", count=3, first=50)
    make(other, tokenizer, tmp_path / "other", template="alpaca_en")
    with pytest.raises(UserError, match="tokenizer chat template: expected"):
        merge([store.folder, tmp_path / "other"], tmp_path / "merged")
    with pytest.raises(UserError, match="got one of conversations"):
        export_blocks(store.folder, tmp_path / "blocks.jsonl", block_size=8)


def test_damaged_answers_are_found(store: TokenStore, tmp_path: Path) -> None:
    damage(store.folder / "tokens.answers")
    assert any("tokens.answers: content changed" in fault for fault in verify(store.folder))
    with pytest.raises(UserError, match=r"tokens\.answers: content changed"):
        split(store.folder, [tmp_path / "x", tmp_path / "y"], weights=[1, 1])
    (store.folder / "tokens.answers").write_bytes(b"x")
    with pytest.raises(UserError, match=r"tokens\.answers: expected \d+ bytes, got 1"):
        TokenStore.open(store.folder)
    (store.folder / "tokens.answers").unlink()
    with pytest.raises(UserError, match=r"tokens\.answers: no such file"):
        TokenStore.open(store.folder)


def test_prompts_with_other_ids_are_counted_and_reported(
    tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If an answer begins with `!`, the template omits the space that it writes after the prompt."""
    (tmp_path / "x.jinja").write_text(
        "{% for m in messages %}{{ m['role'] + ':' }}{{ '' if m['content'][0] == '!' else ' ' }}"
        "{{ m['content'] + '</s>' }}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    odd = {"messages": [MESSAGES[0], {"role": "assistant", "content": "!はい"}]}
    write_lines(tmp_path / "a.jsonl", odd, {"messages": MESSAGES})
    with caplog.at_level(logging.WARNING, "terakoya"):
        facts = make(tmp_path / "a.jsonl", tokenizer, tmp_path / "store", template=str(tmp_path / "x.jinja"))
    assert facts.notes == {UNLIKE_PROMPT: 1}
    assert "1 of 2 conversations begin with other ids than their prompts" in caplog.text


def test_special_tokens_in_messages_are_rejected_if_asked_for(tokenizer: Path, tmp_path: Path) -> None:
    odd = {"instruction": "</s>とは？", "output": "終わりです"}
    write_lines(tmp_path / "a.jsonl", odd, WITH_INPUT)
    facts = make(tmp_path / "a.jsonl", tokenizer, tmp_path / "parse")
    assert facts.literals == {"</s>": 1} and facts.documents == 2
    facts = make(tmp_path / "a.jsonl", tokenizer, tmp_path / "reject", special_tokens_in_text="reject")
    assert facts.rejected_by_reason == {"special token in text": 1} and facts.documents == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--append-eos"], "the template ends each answer"),
        (["--unit", "line"], "a conversation is one sequence"),
        (["--special-tokens-in-text", "split"], "expected parse or reject"),
        (["--clean", "nfkc"], "cleaning steps read plain text"),
        (["--template", "chat"], "--template alpaca|alpaca_en"),
    ],
)
def test_options_of_plain_text_are_refused(
    options: list[str], error: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = conversations(tmp_path / "a.jsonl", count=6)
    words = ["prepare", file, "--conversations", "--tokenizer", tokenizer, "--out", tmp_path / "s", *options]
    assert error in " ".join(refusal(capsys, *words).split())


def test_a_missing_template_or_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
    file = conversations(tmp_path / "a.jsonl", count=6)
    with pytest.raises(UserError, match="add --conversations"):
        make(file, tokenizer, tmp_path / "s", template="alpaca", conversations=False)
    with pytest.raises(UserError, match="hf download nobody/has-this"):
        make(file, Path("nobody/has-this"), tmp_path / "s")


def test_a_sample_shows_template_and_answers(store: TokenStore) -> None:
    def typed(*arguments: object) -> str:
        result = CliRunner().invoke(build_app(), [str(argument) for argument in arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    shown = typed("store", "sample", store.folder, "--rows", 1)
    assert "chat_template.jinja:" in shown and "{%- generation -%}" in shown
    answers = [piece.partition("⟫")[0] for piece in shown.split("⟪")[1:]]
    assert [answer.replace("|", "") for answer in answers] == ["東京です。</s>", "約0人</s>"]
    rows = typed("store", "sample", store.folder, "--rows", 1, "--causal", "--sequence-length", 300)
    assert "(は青い)" in rows and "の|空→</s>" in rows
    count = int(np.count_nonzero(store.read_learned(0, store.facts.tokens)))
    assert f"tokens of answers {count}" in " ".join(typed("store", "info", store.folder).split())


def test_a_store_at_an_address_is_shown_as_the_one_on_disk(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    there = fsspec.filesystem("memory")
    there.put(str(store.folder), "/chats", recursive=True)
    try:
        for words in (("sample", "--rows", "1"), ("sample", "--rows", "1", "--causal"), ("info",)):
            here, far = (
                CliRunner().invoke(build_app(), ["store", words[0], place, *words[1:]], catch_exceptions=False)
                for place in (str(store.folder), "memory://chats")
            )
            assert far.exit_code == 0
            names = str(tmp_path / "cache/terakoya/stores"), str(store.folder), "memory://chats"
            shown = [
                [line for line in each.stdout.splitlines() if not any(name in line for name in names)]
                for each in (here, far)
            ]
            assert shown[0] == shown[1] and len(shown[0]) > 1
            assert words[0] == "sample" or "memory://chats" in far.stdout
    finally:
        there.rm("/chats", recursive=True)
