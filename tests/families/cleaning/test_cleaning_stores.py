"""Cleaning before stores: the command, the record, the pipeline's key, a hold-out that two stores share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from word_tokenizer import line_ids, make_folder

from terakoya.corpus.corpus import Corpus, Document
from terakoya.errors import UserError
from terakoya.preparation.prepare import prepare
from terakoya.store.token_store import TokenStore, read_facts
from terakoya.tokenization.train import train_tokenizer
from terakoya_cleaning.plan import make_plan
from terakoya_contract.toy import make_tokenizer
from terakoya_pipeline.corpora import PipelineCorpus
from terakoya_pipeline.run import Pipeline, run_pipeline

STEPS: list[dict[str, Any]] = [
    {"type": "length", "min_characters": 7},
    {"type": "exact_duplicates"},
    {"type": "hold_out", "share": 0.4},
]
TEXTS = [f"word{n % 60} and more" for n in range(90)] + ["short"] * 7
PLUGIN = """
from terakoya import hookimpl
from word_tokenizer import WordTokenizer

class CleaningTokenizer(WordTokenizer):
    pass

@hookimpl
def register_tokenizers():
    return {"cleaning_words": CleaningTokenizer}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus, a tokenizer, a plugin that reads it, and a file of cleaning steps."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "plugin_cleaning.py").write_text(PLUGIN)
    (tmp_path / "clean.json").write_text(json.dumps(STEPS))
    make_folder(tmp_path / "tokenizer")
    return tmp_path


def terakoya(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    code = "from terakoya.commands.main import main; main()"
    paths = [str(Path(__file__).parents[2] / "helpers"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-c", code, "--plugin", folder / "plugin_cleaning.py", *arguments]
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)


def lines(store: Path) -> set[tuple[int, ...]]:
    opened = TokenStore.open(store)
    return {tuple(opened.tokens[a:b].tolist()) for a, b in zip(opened.offsets, opened.offsets[1:], strict=False)}


def test_two_stores_share_a_corpus_without_a_common_document(folder: Path, forks: None) -> None:
    common = ["prepare", folder / "a.jsonl", "--tokenizer", folder / "tokenizer", "--type", "cleaning_words"]
    common += ["--clean", folder / "clean.json", "--clean-folder", folder / "shared", "--processes", 1]
    train = terakoya(folder, *common, "--out", folder / "train")
    assert train.returncode == 0, train.stderr
    assert "cleaning: length dropped 7 of 97 documents" in train.stderr
    assert "a.jsonl:91: short" in train.stderr
    assert "cleaning: exact_duplicates dropped 30 of 97 documents" in train.stderr
    held = terakoya(folder, *common, "--out", folder / "held", "--held-out")
    assert held.returncode == 0, held.stderr
    described = [line for line in held.stderr.splitlines() if line.startswith("cleaning: ")]
    facts = [read_facts(folder / name) for name in ("train", "held")]
    assert len(described) == 1, "the plan was described when it was made"
    assert f"dropped 37 of 97 documents and held out {facts[1].documents}, as " in described[0]
    assert facts[0].documents + facts[1].documents == 60
    assert min(store.documents for store in facts) > 10
    assert facts[0].options["clean: dropped by length"] == 7
    assert facts[0].options["clean: held out"] == facts[1].documents
    one, other = lines(folder / "train"), lines(folder / "held")
    assert not one & other
    assert one | other == {tuple(line_ids(text, 1000)[0]) for text in TEXTS if text != "short"}
    again = terakoya(folder, *common, "--out", folder / "train")
    assert again.returncode == 0, again.stderr
    (folder / "clean.json").write_text(json.dumps(STEPS[:1]))
    changed = terakoya(folder, *common, "--out", folder / "train")
    assert changed.returncode == 2
    assert "made from other input; changed: corpus" in changed.stderr
    refused = terakoya(folder, *common, "--out", folder / "new", "--held-out")
    assert refused.returncode == 2
    assert "held_out: expected a step" in refused.stderr


def test_a_list_of_what_is_dropped_is_written_where_it_is_asked_for(folder: Path, forks: None) -> None:
    common = ["prepare", folder / "a.jsonl", "--tokenizer", folder / "tokenizer", "--type", "cleaning_words"]
    common += ["--processes", 1, "--out", folder / "store"]
    clean, listed = ["--clean", folder / "clean.json"], folder / "lists" / "dropped.jsonl"
    done = terakoya(folder, *common, *clean, "--rejects", listed)
    assert done.returncode == 0, done.stderr
    assert str(listed) in done.stderr
    assert listed.read_bytes() == (folder / "store.clean" / "rejects.jsonl").read_bytes()
    records = [json.loads(line) for line in listed.read_bytes().splitlines()]
    assert len(records) == 37
    assert b"word3" not in listed.read_bytes()
    assert terakoya(folder, *common, *clean, "--rejects", listed, "--rejects-text").returncode == 0
    with_text = [json.loads(line) for line in listed.read_bytes().splitlines()]
    assert with_text == [{**each, "text": TEXTS[each["line"] - 1]} for each in records], "also of a plan that is there"
    for options, message in (
        (["--rejects", listed], "--rejects: expected --clean as well"),
        ([*clean, "--rejects-text"], "--rejects-text: expected --rejects FILE as well"),
        ([*clean, "--rejects", "s3://bucket/x.jsonl"], "expected a file, got an address"),
        ([*clean, "--rejects", folder / "x.txt"], "expected a name that ends in .jsonl"),
    ):
        refused = terakoya(folder, *common, *options)
        assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr


NONE = {"type": "hold_out", "share": 1e-9, "seed": 7}
ALL = {"type": "hold_out", "share": 0.999999}


@pytest.mark.parametrize(
    ("texts", "clean", "held_out", "expected"),
    [
        (["one", "two"], [NONE], True, "hold_out with share 1e-09 and seed 7 takes 0 of 2 documents"),
        (["one", "two"], [ALL], False, "hold_out with share 0.999999 and seed 0 takes 2 of 2 documents"),
        (["one"], [NONE], True, "takes 0 of 1 documents; give more documents, or leave it out"),
        (["one", ""], [NONE], True, "takes 0 of 1 documents"),
        (["one", "two"], [STEPS[0], NONE], False, "the cleaning steps drop all 2; change the steps"),
        ([""], [NONE], False, "one document,? (that is not|but all are) rejected"),
    ],
)
def test_a_side_that_a_hold_out_leaves_empty_is_explained(
    tmp_path: Path, texts: list[str], clean: list[dict[str, Any]], held_out: bool, expected: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    make_tokenizer(tmp_path / "tokenizer")
    options: dict[str, Any] = {"clean": clean, "processes": 1}
    with pytest.raises(UserError, match=expected):
        prepare([file], tokenizer=tmp_path / "tokenizer", out=tmp_path / "out", held_out=held_out, **options)
    if not held_out:
        settings = {"type": "byte_bpe", "vocab_size": 300}
        with pytest.raises(UserError, match=expected):
            train_tokenizer([file], tmp_path / "trained", settings=settings, **options)


@pytest.mark.parametrize("held_out", [False, True])
def test_rejects_are_limited_beside_all_documents_on_either_side(held_out: bool, tmp_path: Path) -> None:
    files, clean = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], [{"type": "exact_duplicates"}, STEPS[2]]
    lines = [json.dumps({"text": f"text {number % 250}"}) for number in range(300)]
    files[1].write_text("\n".join(lines))
    make_tokenizer(tmp_path / "tokenizer")

    def documents(broken: int, shard: str | None = None) -> int:
        files[0].write_text("\n".join([*["{"] * broken, *lines]))
        out = tmp_path / f"{broken} {shard is None}"
        options: dict[str, Any] = {"clean": clean, "processes": 1, "max_rejects": 0.01, "held_out": held_out}
        return prepare(files, tokenizer=tmp_path / "tokenizer", out=out, shard=shard, **options).documents

    assert documents(6) in (range(80, 120) if held_out else range(130, 170))
    with pytest.raises(UserError, match=r"at most 6 rejected .* got 7 of 607 documents"):
        documents(7)
    with pytest.raises(UserError, match=r"at most 3 rejected .* got 4 of 304 documents"):
        documents(4, shard="1/2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("[", "the file ends too early"),
        ("{}", "expected a list of one cleaning step"),
        ('[{"type": "nfk"}]', r'clean\.json: 0\.type.*"nfkc"'),
    ],
)
def test_a_wrong_file_of_steps_is_refused(folder: Path, content: str | None, message: str) -> None:
    (folder / "clean.json").unlink()
    if content is not None:
        (folder / "clean.json").write_text(content)
    with pytest.raises(UserError, match=message):
        prepare([folder / "a.jsonl"], tokenizer=folder / "tokenizer", out=folder / "out", clean=folder / "clean.json")


def test_a_shard_of_a_cleaned_corpus(folder: Path, forks: None) -> None:
    common = ["prepare", folder / "a.jsonl", "--tokenizer", folder / "tokenizer", "--type", "cleaning_words"]
    common += ["--clean", folder / "clean.json", "--clean-folder", folder / "shared", "--processes", 1]
    for options in (["--out", folder / "all"], ["--out", folder / "one", "--shard", "1/1"]):
        made = terakoya(folder, *common, *options)
        assert made.returncode == 0, made.stderr
    assert lines(folder / "one") == lines(folder / "all")
    refused = terakoya(folder, *common, "--out", folder / "two", "--shard", "3/2")
    assert refused.returncode == 2
    assert "--shard: expected a number from 1 to 2, got 3" in refused.stderr


def test_a_store_continues_the_plan_of_a_shard(folder: Path) -> None:
    (folder / "b.jsonl").write_text((folder / "a.jsonl").read_text())
    read = [folder / "a.jsonl", folder / "b.jsonl", "--clean", folder / "clean.json", "--processes", 1]
    made = terakoya(folder, "clean", *read, "--out", folder / "shared", "--shard", "1/2")
    assert made.returncode == 0 and "1 of 2 files are read" in made.stdout + made.stderr
    following = made.stderr.partition("next: ")[2]
    assert " clean " in following and "--shard" not in following
    (part,) = (folder / "shared" / ".cleaning").glob("*.npy")
    part.write_bytes(part.read_bytes().replace(b"word1 ", b"taken "))  # an excerpt: of this part, not of one made again
    tokenizer = ["--tokenizer", folder / "tokenizer", "--type", "cleaning_words"]
    options = [*tokenizer, "--clean-folder", folder / "shared", "--out", folder / "out"]
    prepared = terakoya(folder, "prepare", *read, *options)
    assert prepared.returncode == 0 and "taken and more" in prepared.stdout + prepared.stderr


# ---------------------------------------------------------------------------------------------------- the pipeline


def _pipeline(folder: Path, **changes: Any) -> dict[str, Any]:
    keys = {key: str(folder / key) for key in ("store", "run", "export", "validation_store")}
    keys["tokenizer_folder"] = str(folder / "tokenizer")
    return {**keys, "corpus": [str(folder / "a.jsonl")], "parameters": {}, "clean": STEPS, **changes}


def _texts(corpus: Corpus) -> list[str]:
    items = [item for block in corpus.blocks() for item in corpus.read(block)]
    return [item.text for item in items if isinstance(item, Document)]


def test_the_pipeline_trains_and_validates_on_the_two_sides(folder: Path) -> None:
    corpus = _only_corpus(_pipeline(folder))
    make_plan(corpus.whole)
    assert (folder / "store.clean" / "plan.json").exists()
    train, validation = (_texts(corpus.parts["train"]), _texts(corpus.parts["validation"]))
    assert sorted(train + validation) == sorted({text for text in TEXTS if text != "short"})
    assert corpus.store_inputs("train")["clean"] == tuple(STEPS)
    assert "clean" not in _only_corpus(_pipeline(folder, clean=[], hold_out=1)).store_inputs("train")


def _only_corpus(keys: dict[str, Any]) -> PipelineCorpus:
    pipeline = Pipeline.model_validate(keys)
    return PipelineCorpus(pipeline.sources[0], pipeline)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hold_out": 3}, "give hold_out as the last step of clean"),
        ({"validation_corpus": ["b.jsonl"]}, "validation_corpus or the step hold_out, not both"),
        ({"clean": STEPS[:1]}, "validation_store goes together with"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pipeline.model_validate(_pipeline(folder, **changes))


def test_a_wrong_step_is_found_before_the_first_stage(folder: Path) -> None:
    pipeline = Pipeline.model_validate(_pipeline(folder, clean=[{"type": "lenght"}, STEPS[-1]]))
    with pytest.raises(UserError, match=r'pipeline: clean\.0\.type: .*did you mean "length"'):
        list(run_pipeline(pipeline))
    assert not (folder / "store").exists()
