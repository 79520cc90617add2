"""An export carries the hashes of its files, and whatever reads it compares them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from terakoya.conversion.export import export, load_model
from terakoya.errors import UserError
from terakoya.inference.loading import load_model_and_tokenizer
from terakoya.toolkit.formats import folder_digests, model_folder
from terakoya_checks.verify import verify
from terakoya_contract.toy import make_tokenizer
from terakoya_forks.average import average


def average_it(folder: Path) -> None:
    average([folder, folder], folder.parent / "averaged")


def verify_it(folder: Path) -> None:
    problems = verify(folder).problems
    if problems:
        raise UserError("; ".join(map(str, problems)) + "; export it again")


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A tiny Llama, exported."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, pad_token_id=3,
    )  # fmt: skip
    make_tokenizer(tmp_path / "source")
    model_folder.write(LlamaForCausalLM(config), tmp_path / "source")
    export(tmp_path / "source", tmp_path / "model")
    return tmp_path / "model"


def flip_weight(folder: Path) -> None:
    """Changes a number to another finite number: only a hash tells."""
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(bytes(content))


def change_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace("10000.0", "20000.0"))


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


DAMAGES = {"model.safetensors": flip_weight, "config.json": change_config, "tokenizer.json": remove_tokenizer}


def try_it(folder: Path) -> None:
    load_model_and_tokenizer(AutoModelForCausalLM, folder)


@pytest.mark.parametrize("read", [try_it, load_model])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_changed_file_is_refused_by_name(name: str, read: Callable[[Path], object], exported: Path) -> None:
    read(exported)
    DAMAGES[name](exported)
    with pytest.raises(UserError, match=rf"{exported}: changed since it was exported: {name}: "):
        read(exported)


@pytest.mark.parametrize("name", DAMAGES)
def test_verify_recomputes_the_hashes(name: str, exported: Path) -> None:
    sound = verify(exported)
    assert not sound.problems and "files with their recorded hashes" in sound.checked[0]
    DAMAGES[name](exported)
    assert any(f"{exported}: {name}: " in line for line in verify(exported).problems)


def test_other_files_and_folders_without_digests_are_left_alone(exported: Path) -> None:
    (exported / "README.md").write_text("mine")
    assert not verify(exported).problems
    flip_weight(exported)
    (exported / folder_digests.NAME).unlink()
    assert not verify(exported).problems
    try_it(exported)


def test_damaged_digests_are_no_digests_that_fit(exported: Path) -> None:
    file = exported / folder_digests.NAME
    file.write_text(file.read_text().replace('"size": ', '"size": 1', 1))
    with pytest.raises(UserError, match=rf"{folder_digests.NAME}: damaged"):
        try_it(exported)


def test_weights_that_cannot_be_read_are_reported_as_changed(exported: Path) -> None:
    file = exported / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[:8] = b"\xff" * 8  # the length of the header
    file.write_bytes(bytes(content))
    with pytest.raises(UserError, match=r"changed since it was exported: model\.safetensors"):
        try_it(exported)


def test_weights_are_read_while_the_block_runs(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    facts = folder_digests.FileFacts.of

    def of(file: Path) -> object:
        import threading

        threads.append((file.name, threading.current_thread() is threading.main_thread()))
        return facts(file)

    monkeypatch.setattr(
        folder_digests, "FileFacts", SimpleNamespace(of=of, model_validate=folder_digests.FileFacts.model_validate)
    )
    with folder_digests.check_while_loading(exported), torch.no_grad():
        assert ("config.json", True) in threads
    assert ("model.safetensors", False) in threads


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "foreign"])
@pytest.mark.parametrize("read", [try_it, load_model, average_it, verify_it])
def test_files_that_were_not_downloaded_whole_are_named_with_what_to_do(
    exported: Path, read: Callable[[Path], object], recorded: bool
) -> None:
    """Also where nothing records how large they are; a pointer of Git LFS may be in place of any of them."""
    file = exported / "model.safetensors"
    content = file.read_bytes()
    if not recorded:
        (exported / folder_digests.NAME).unlink()
    cut, header = (("got .*; ex" if recorded else "by its header, got"), ("got" if recorded else "within its header"))
    for size, words in {len(content) - 1: cut, 100: header, 4: header}.items():
        file.write_bytes(content[:size])
        with pytest.raises(UserError, match=rf"model\.safetensors: .*{words}"):
            read(exported)
    for name in ("model.safetensors", "tokenizer.json"):
        file.write_bytes(content)
        (exported / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
        with pytest.raises(UserError, match=rf"{name}: is a pointer of Git LFS in place of the file; `git lfs pull`"):
            read(exported)
