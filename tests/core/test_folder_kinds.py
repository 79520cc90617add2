"""A folder in the place of another: what it is and what to do with it; addresses are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from terakoya.atomic_files import check_new_folder
from terakoya.config.file_kinds import PIPELINE, refuse_other_kind
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found, kind_of, missing_file, nearest_paths
from terakoya.places import check_local, is_local
from terakoya.tokenization.import_model import import_tokenizer
from terakoya.tokenization.recognise import recognise_tokenizer

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def make(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("{}")
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {
        "run": make(tmp_path / "run", "metrics.jsonl", "parameters.json", "checkpoints/x"),
        "checkpoint": make(tmp_path / "step-1", "manifest.json", "state/x", "tokenizer/vocab.txt"),
        "token store": make(tmp_path / "store", "store.json", "tokens.bin", "tokenizer/vocab.txt"),
        "Transformers model": make(tmp_path / "model", "config.json", "vocab.txt"),
        "tokenizer": make(tmp_path / "tok", "tokenizer_config.json", "vocab.txt"),
        "corpus": make(tmp_path / "text", "a.jsonl", "b.txt"),
    }


def test_each_kind_of_folder_is_known_by_its_files(folders: dict[str, Path], tmp_path: Path) -> None:
    assert {kind: kind_of(folder) for kind, folder in folders.items()} == {kind: kind for kind in folders}
    assert kind_of(make(tmp_path / "electra", "generator/config.json")) == "Transformers model"
    assert kind_of(make(tmp_path / "other", "x.bin")) is None and kind_of(tmp_path / "none") is None
    assert kind_of(folders["corpus"] / "a.jsonl") == "corpus" and kind_of(Path("/dev/null")) is None
    assert describe_found(Path("/dev/null"), "run") == "a file"


@pytest.mark.parametrize(
    ("expected", "kind", "said"),
    [
        ("token store", "run", "a run; {path}/parameters.json names its stores"),
        ("token store", "tokenizer", "a tokenizer; make a token store with it: terakoya prepare CORPUS --tokenizer"),
        ("token store", "corpus", "a corpus; make a token store of it: terakoya prepare {path} --tokenizer"),
        ("tokenizer", "token store", "a token store; its tokenizer is in {path}/tokenizer"),
        ("run", "token store", "a token store; `terakoya store info {path}` describes it"),
        ("Transformers model", "run", "a run; export a model from it: terakoya export {path} --out MODEL"),
        ("Transformers model", "corpus", "a folder of other files"),
    ],
)  # fmt: skip
def test_what_is_there_is_said_with_what_to_do(folders: dict[str, Path], expected: str, kind: str, said: str) -> None:
    assert describe_found(folders[kind], expected).startswith(said.format(path=folders[kind]))


def test_a_missing_path_is_answered_with_the_nearest_name(folders: dict[str, Path], tmp_path: Path) -> None:
    assert describe_found(tmp_path / "stroe", "token store") == f"no such folder (did you mean {tmp_path / 'store'}?)"
    assert describe_found(tmp_path / "zzz", "token store") == "no such folder"
    assert (
        describe_found(tmp_path / "no" / "store", "token store")
        == f"no such folder; there is no folder {tmp_path / 'no'}"
    )
    assert missing_file(tmp_path / "text" / "a.json") == f"no such file (did you mean {tmp_path / 'text' / 'a.jsonl'}?)"
    assert missing_file(folders["run"]) == f"expected a file, got a run; did you mean {folders['run']}/parameters.json?"
    assert describe_found(folders["tokenizer"] / "vocab.txt", "run") == "a file"


@pytest.mark.parametrize("address", ["s3://b/run", "gs://b/x.html", "hf://datasets/x", "https://host/x", "file:///x"])
def test_an_address_is_refused_as_an_output(address: str) -> None:
    for path in (address, Path(address)):
        assert not is_local(path)
        with pytest.raises(UserError, match=f"{address.partition(':')[0]}://.*: expected a new folder, got an address"):
            check_local(path, "a new folder")
    with pytest.raises(UserError, match="got an address"):
        check_new_folder(Path(address))


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_a_new_folder_needs_a_name(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="expected a new folder"):
        check_new_folder(Path(path))


@pytest.mark.parametrize("path", ["work/run", "C:/work/run", "/work:1/run", "run", "./s3/b", "a:b"])
def test_a_path_is_no_address(path: str) -> None:
    assert is_local(path) and is_local(Path(path))


def refusal(function: Any, *arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        function(*arguments)
    return str(caught.value)


def test_an_address_of_a_store_or_a_run_is_refused_where_it_is_opened(tmp_path: Path) -> None:
    from terakoya.runs import metrics
    from terakoya.runs.folder import check_place
    from terakoya.store.token_store import TokenStore

    store = refusal(TokenStore.open, Path("s3://bucket/store"))
    assert "expected a finished token store, got an address; at s3:// can be corpora, the stores of a run" in store
    assert "expected the run's folder, got an address" in refusal(check_place, Path("s3://bucket/run"))
    assert "expected the folder of a run, got an address" in refusal(metrics.read, Path("gs://bucket/run"))


def test_a_run_does_not_go_into_a_folder_of_something_else(folders: dict[str, Path], tmp_path: Path) -> None:
    from terakoya.runs.folder import check_place

    for place in (folders["run"], tmp_path / "new", folders["corpus"]):
        check_place(place)
    assert refusal(check_place, folders["token store"]).endswith(
        "expected a new folder or a run's, got a token store; choose another --out"
    )
    assert "got a file" in refusal(check_place, folders["run"] / "metrics.jsonl")


def test_a_path_in_the_command_to_give_next_is_quoted(tmp_path: Path) -> None:
    hostile = tmp_path / "a`touch x` $(id)"
    quoted = f"'{hostile}'"
    assert f"terakoya export {quoted} --out" in describe_found(make(hostile, "metrics.jsonl"), "Transformers model")
    file = make(tmp_path / "b; id", "p.json") / "p.json"
    parameters = {"data": {}, "architecture": {}, "objective": {}}
    with pytest.raises(UserError) as refused:
        refuse_other_kind(file, parameters, expected=PIPELINE)
    assert f"`terakoya train '{file}' --out RUN`" in str(refused.value)


@pytest.mark.parametrize("text", ["a" * 5000, "a\0b", "no-such-folder/a"])
def test_next_to_what_can_be_no_path_is_nothing(text: str) -> None:
    assert nearest_paths(Path(text)) == []


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a.parquet", "vocab.txt", "tokenizer.json", "spiece.model"])
def test_what_git_lfs_has_not_fetched_is_no_text_and_no_tokenizer(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(POINTER)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    with pytest.raises(UserError, match=f"{name}: is a pointer of Git LFS in place of the file; `git lfs pull` gets"):
        Corpus([file]) if name.startswith("a.") else recognise_tokenizer(tmp_path)
    with pytest.raises(UserError, match=f"{name}: is a pointer of Git LFS"):
        import_tokenizer(file, tmp_path / "out", settings={"type": "sentencepiece"})
