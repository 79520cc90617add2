"""Secrets are recognised by their form, wherever they stand: refused in JSON, hidden in addresses and messages."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest
from command_line import exit_code
from small_preparation import prepare_corpus
from word_tokenizer import WordTokenizer, make_folder

from terakoya.corpus.corpus import Corpus
from terakoya.corpus.files import find_files
from terakoya.errors import UserError
from terakoya.json_settings import refuse_secrets
from terakoya.log import hide_secrets
from terakoya_pipeline.settings import read_pipeline

SECRETS = {
    "Hugging Face": "hf_" + "a1" * 17,
    "AWS": "AKIA" + "Q7" * 8,
    "GitHub": "ghp_" + "b2" * 18,
    "OpenAI": "sk-proj-" + "c3" * 12,
    "Slack's webhook": "https://hooks.slack.com/services/T0PLANTED/B0PLANTED/PLANTED",
    "Discord's webhook": "https://discord.com/api/webhooks/123/PLANTED-x_y",
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJQTEFOVEVEIn0.cGxhbnRlZA",
    "bearer": "Bearer PLANTED0123456789abc",
    "URL": "https://user:PLANTED@host/x",
    "bucket": "s3://AKIDPLANTED:SE/CRET+PLANTED@bucket/wiki",
    "token in a URL": "https://PLANTED@example.com/x",
    "signed URL": "https://bucket.example.com/a.jsonl?X-Amz-Signature=PLANTED",
}
NO_SECRETS = (
    "http://localhost:5000/a@b", "hf://datasets/name/set@0123456789abcdef/a.jsonl", "s3://bucket/wiki-?.jsonl",
    "sftp://me@host/corpus", "Basic internationalization", "a/b:c@d", "task-oriented", "https://example.com/x?page=2",
    "export WANDB_API_KEY=$(cat ~/.wandb)", 'export HF_TOKEN="$TOKEN" TOKENIZERS_PARALLELISM=false', "TOKEN= ls",
    "f(eos_token=x)",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_in_a_value_is_refused_by_its_key(name: str, tmp_path: Path) -> None:
    raw = {"trackers": [{"name": f"see {SECRETS[name]}"}]}
    file = tmp_path / "pipeline.json"
    file.write_text(json.dumps({"corpus": SECRETS[name]}))
    with pytest.raises(UserError, match=r"^p.json: trackers\.0\.name: looks like a secret") as refused:
        refuse_secrets(raw, "p.json")
    with pytest.raises(UserError, match=r"^pipeline.json: corpus: looks like a secret") as also_refused:
        read_pipeline(file)
    for message in (str(refused.value), str(also_refused.value), hide_secrets(f"at {SECRETS[name]}")):
        assert SECRETS[name] not in message and "PLANTED" not in message


@pytest.mark.parametrize("text", NO_SECRETS)
def test_what_is_no_secret_stays(text: str) -> None:
    refuse_secrets({"note": text}, "p.json")
    assert hide_secrets(text) == text


def test_the_password_of_a_corpus_is_used_and_in_no_file_and_no_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    system = fsspec.filesystem("memory")
    lines = [json.dumps({"text": f"document {number}"}) for number in range(300)]
    system.pipe("/user:PLANTED@corpus/a.jsonl", "\n".join([*lines, "{not json"]).encode())
    system.pipe("/user:PLANTED@corpus/cut.jsonl.gz", b"\x1f\x8b\x08\x00cut")
    tokenizer = make_folder(tmp_path / "tokenizer")
    try:
        corpus = Corpus(find_files(["memory://user:PLANTED@corpus/a.jsonl"]))
        facts = prepare_corpus(corpus, WordTokenizer(), tokenizer, tmp_path / "store", max_rejects=5)
        assert facts.documents == 300 and facts.rejected == 1
        messages = [repr(corpus), caplog.text]
        for name in ("missing.jsonl", "cut.jsonl.gz", "a.pdf"):
            address = f"memory://user:PLANTED@corpus/{name}"
            exit_code("prepare", address, "--tokenizer", tokenizer, "--out", tmp_path / name)
        with pytest.raises(UserError) as refused:
            find_files(["hf://user:PLANTED@datasets/a.jsonl"])
        messages += [str(refused.value), *capfd.readouterr()]
    finally:
        system.rm("/user:PLANTED@corpus", recursive=True)
    assert "memory://***@corpus/" in messages[-1]
    assert not [message for message in messages if "PLANTED" in message]
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) > 5 and not [file for file in written if b"PLANTED" in file.read_bytes()]
