"""An upload pushes what belongs to the model and what the user names; nothing else in the folder leaves the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from terakoya.errors import UserError
from terakoya.toolkit.formats import folder_digests
from terakoya.toolkit.formats.model_files import belongs_to_model
from terakoya_hub.card_training import CHART
from terakoya_hub.model_card import CARD
from terakoya_hub.published_files import choose_files

TOKEN = "hf_PLANTEDplantedPLANTEDplanted012345"


def write(folder: Path, *names: str, text: str = "x\n") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A folder with the record of an export, as of a model with an adapter."""
    folder = tmp_path / "model"
    write(folder, "config.json", text="{}")
    write(folder, "model.safetensors", "vocab.txt", "tokenizer_config.json", "adapter/adapter_model.safetensors")
    folder_digests.write(folder)
    return folder


EXPORTED = {
    "config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json", "adapter/adapter_model.safetensors",
    "terakoya_files.json",
}  # fmt: skip


def test_of_an_export_its_own_files_are_pushed_and_all_others_are_named(exported: Path) -> None:
    write(exported, "README.md", "training.svg", "terakoya_scores.json")  # written later, by `upload` and `evaluate`
    write(exported, ".env", text=f"HF_TOKEN={TOKEN}\n")
    write(exported, "tokenizer.json", "train.jsonl", "old/optimizer.pt", "old/a/scheduler.pt", "adapter/notes.txt")
    (exported / "passwd").symlink_to("/etc/passwd")
    (exported / "loop").symlink_to(".")
    chosen = choose_files(exported)
    assert chosen.files.keys() == EXPORTED | {"README.md", "training.svg", "terakoya_scores.json"}
    assert all(belongs_to_model(exported / name) for name in (CARD, CHART)), "and not to its tokenizer"
    assert chosen.left_out == [
        ".env", "adapter/notes.txt", "loop", "old/ (2 files)", "passwd", "tokenizer.json", "train.jsonl"
    ]  # fmt: skip


def test_further_files_are_pushed_by_name_alone(exported: Path, tmp_path: Path) -> None:
    write(exported, "LICENSE", "docs/more.md", "docs/other.md")
    write(tmp_path, "elsewhere/NOTICE")
    also = [exported / "LICENSE", exported / "docs/more.md", tmp_path / "elsewhere/NOTICE"]
    chosen = choose_files(exported, also)
    assert chosen.files.keys() == EXPORTED | {"LICENSE", "docs/more.md", "NOTICE"}
    assert chosen.left_out == ["docs/other.md"]
    with pytest.raises(UserError, match=r"--also .*docs: expected a file, found none"):
        choose_files(exported, [exported / "docs"])


def test_no_link_is_followed_out_of_the_folder(exported: Path, tmp_path: Path) -> None:
    write(tmp_path, "secret.txt")
    (exported / "link.txt").symlink_to(tmp_path / "secret.txt")
    (exported / "within.txt").symlink_to("vocab.txt")
    assert "link.txt" not in choose_files(exported, [exported / "within.txt"]).files
    with pytest.raises(UserError, match=r"link\.txt: is a link to .*secret\.txt, outside the folder"):
        choose_files(exported, [exported / "link.txt"])
    (exported / "README.md").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UserError, match=r"README\.md: is a link to"):
        choose_files(exported)
    (exported / "README.md").unlink()
    (exported / "adapter/adapter_model.safetensors").unlink()
    (exported / "adapter").rmdir()
    write(tmp_path, "weights/adapter_model.safetensors")
    (exported / "adapter").symlink_to(tmp_path / "weights")
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: is a link to"):
        choose_files(exported)
    (tmp_path / "name").symlink_to(exported)  # the folder itself may be one
    (exported / "adapter").unlink()
    write(exported, "adapter/adapter_model.safetensors")
    assert choose_files(tmp_path / "name").files.keys() == EXPORTED


@pytest.mark.parametrize(
    ("name", "text", "refused"),
    [
        ("README.md", f"# Mine\n\nfirst set HF_TOKEN={TOKEN}\n", ":3: looks like a secret"),
        ("README.md", "see https://me:mypassword@example.com/x\n", ":1: looks like a secret"),
        ("README.md", 'special = dict(BOS_TOKEN="<s>")\n', None),
        ("also.env", "DB_PASSWORD=swordfish\n", ":1: looks like a secret"),
        ("also.pem", "-----BEGIN RSA PRIVATE KEY-----\n", ":1: looks like a secret"),
        ("also.txt", "the token of a text\n", None),
    ],
)
def test_a_file_with_a_secret_is_refused_at_its_line(exported: Path, name: str, text: str, refused: str | None) -> None:
    write(exported, name, text=text)
    also = [exported / name] if name.startswith("also") else []
    if refused is None:
        assert name in choose_files(exported, also).files
    else:
        with pytest.raises(UserError, match=f"{name}{refused}"):
            choose_files(exported, also)


def test_of_a_foreign_folder_what_transformers_reads_is_pushed(tmp_path: Path) -> None:
    """Divided weights, code, a dictionary that the settings name, and the steps of Sentence Transformers."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=400, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertForMaskedLM(config).save_pretrained(tmp_path, max_shard_size="10KB")
    shards = {path.name for path in tmp_path.glob("model-*.safetensors")}
    assert len(shards) > 1
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["auto_map"] = {"AutoModel": "mine.Model", "AutoConfig": "other/repository--theirs.Config"}
    write(tmp_path, "config.json", text=json.dumps(settings))
    write(tmp_path, "mine.py", text="from .parts import f\n")
    write(tmp_path, "parts.py", "vocab.txt", "spiece.model", "user.dic", "theirs.py")
    tokenizer = {
        "tokenizer_class": "T5Tokenizer", "mecab_kwargs": {"dic": "user.dic", "rc": "/etc/hosts", "up": "../x"},
        "auto_map": {"AutoTokenizer": ["code.Slow", None]},
    }  # fmt: skip
    write(tmp_path, "tokenizer_config.json", text=json.dumps(tokenizer))
    write(tmp_path, "code.py", text="")
    modules = [{"path": ""}, {"path": "1_Pooling"}]
    write(tmp_path, "modules.json", text=json.dumps(modules))
    write(tmp_path, "1_Pooling/config.json", "1_Pooling/notes.txt")
    strangers = ["optimizer.pt", "training_args.bin", "rng_state.pth", ".env", "corpus.jsonl", "notes.py", "theirs.py"]
    write(tmp_path, *strangers)
    chosen = choose_files(tmp_path)
    assert chosen.files.keys() == shards | {
        "config.json", "generation_config.json", "model.safetensors.index.json", "mine.py", "parts.py", "code.py",
        "vocab.txt", "spiece.model", "user.dic", "tokenizer_config.json", "modules.json", "1_Pooling/config.json",
    } - ({"generation_config.json"} - {path.name for path in tmp_path.iterdir()})  # fmt: skip
    assert chosen.left_out == sorted([*strangers, "1_Pooling/notes.txt"])
