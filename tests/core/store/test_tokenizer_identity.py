"""Ids of two tokenizers are not mixed: not of one size with the same special ids, and not split by other rules."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from small_preparation import prepare_corpus
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from terakoya.config.data import Data
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.rows.stores import Stores
from terakoya.store.token_store import TokenStore
from terakoya.store.tokenizer_identity import check_tokenizer_of_run
from terakoya.training.resuming.changes import check_vocabulary
from terakoya_stores.merge import merge

PIECES = ["[UNK]", "東", "京", "東京", "大", "阪"]


def make_tokenizer(folder: Path, pieces: list[str], merges: list[tuple[str, str]]) -> Path:
    backend = Backend(models.BPE({piece: id for id, piece in enumerate(pieces)}, merges, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(folder)
    return folder


def make_store(folder: Path, tokenizer: Path) -> Path:
    (folder.parent / "a.txt").write_text("東京 大阪 東京\n\n大阪 東京")
    kind = registry().component("tokenizers", "huggingface")()
    prepare_corpus(Corpus([folder.parent / "a.txt"]), kind, tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stores of a tokenizer, of the same one saved again, of one with other ids, and of one with fewer merges."""
    base = tmp_path_factory.mktemp("stores")
    merges = [("東", "京")]
    swapped = [*PIECES[:4], "阪", "大"]
    folders = {
        "a": make_tokenizer(base / "a-tokenizer", PIECES, merges),
        "other": make_tokenizer(base / "other-tokenizer", swapped, merges),
        "rules": make_tokenizer(base / "rules-tokenizer", PIECES, []),
        "again": base / "again-tokenizer",
    }
    again = AutoTokenizer.from_pretrained(folders["a"], padding_side="left", truncation_side="left")
    again.backend_tokenizer.enable_truncation(16)
    again.save_pretrained(folders["again"])
    return {name: make_store(base / name, folder) for name, folder in folders.items()}


def data(train: list[Path], validation: list[Path] = [], stages: list[Path] = []) -> Data:  # noqa: B006
    more = [{"from_step": 2, "train": [str(path)]} for path in stages]
    return Data.model_validate(
        {"train": list(map(str, train)), "validation": list(map(str, validation)), "stages": more, "sequence_length": 8}
    )


@pytest.mark.parametrize("where", ["train", "validation", "stages"])
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("other", '2 ids mean something else: id 4 is "大" in {a}/tokenizer, "阪" in {b}/tokenizer; id 5 is "阪" in '),
        ("rules", "other: tokenizer tokenizer.json"),
    ],
)
def test_a_run_does_not_mix_tokenizers(stores: dict[str, Path], where: str, other: str, reason: str) -> None:
    a, b = stores["a"], stores[other]
    assert TokenStore.open(a).facts.vocabulary == TokenStore.open(b).facts.vocabulary
    chosen = data([a, b]) if where == "train" else data([a], **{where: [b]})
    message = f"{b}: was prepared with another tokenizer than {a} ({reason.format(a=a, b=b)}"
    with pytest.raises(UserError, match=re.escape(message) + ".*; prepare it with the same"):
        Stores.open(chosen)


def test_the_same_tokenizer_saved_again_is_the_same(stores: dict[str, Path]) -> None:
    names = [TokenStore.open(stores[name]).facts.inputs["tokenizer tokenizer.json"] for name in ("a", "again")]
    assert names[0] != names[1]
    Stores.open(data([stores["a"], stores["again"]], [stores["a"]]))


def test_merged_and_evaluated_stores_are_compared(stores: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'id 4 is "大" in .*, "阪" in '):
        merge([stores["a"], stores["other"]], tmp_path / "merged")
    store = TokenStore.open(stores["other"])
    check_tokenizer_of_run(store, stores["other"] / "tokenizer")
    with pytest.raises(UserError, match=r"than the run's .2 ids mean something else: id 4 is"):
        check_tokenizer_of_run(store, stores["a"] / "tokenizer")
    checkpoint = tmp_path / "step-00000001"  # of a run on `a`: --allow-change data never means another tokenizer
    shutil.copytree(stores["a"] / "tokenizer", checkpoint / "tokenizer")
    with pytest.raises(UserError, match=r"than the run's .2 ids mean something else: id 4 is"):
        check_vocabulary(checkpoint, Stores.open(data([stores["other"]])))
