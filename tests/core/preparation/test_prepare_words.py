"""`prepare --words`: stores with the words of a word finder, their records, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import exit_code
from small_vocabularies import train_tokenizers
from transformers import AutoTokenizer
from word_tokenizer import WordTokenizer, make_folder

import terakoya
from terakoya import plugins
from terakoya.components.rows import Layout
from terakoya.errors import UserError
from terakoya.preparation.word_borders import FOUND, INSIDE
from terakoya.rows.loader import Loader
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import StoreFacts, TokenStore
from terakoya_checks.verify_store import verify
from terakoya_pipeline.corpora import PipelineCorpus
from terakoya_pipeline.settings import read_pipeline
from terakoya_schemas.files import schema_of
from terakoya_stores.merge import merge
from terakoya_stores.sample import sample_masked

DEMO = (Path(terakoya.__file__).parent / "corpus" / "demo_corpus.txt").read_text(encoding="utf-8")[:12_000]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a byte-level BPE, and stores of it: `plain`, and `words` with MeCab's words."""
    home = tmp_path_factory.mktemp("words")
    (home / "corpus.txt").write_text(DEMO, encoding="utf-8")
    (home / "bytes").mkdir()
    train_tokenizers(home / "bytes", DEMO, "bytes")
    make(home, "plain")
    make(home, "words", words="mecab")
    return home


def make(home: Path, name: str, **options: Any) -> StoreFacts:
    given = {"tokenizer": home / "bytes", "out": home / name, "processes": 1, **options}
    return terakoya.prepare([home / "corpus.txt"], **given)


def test_the_store_has_the_same_ids_and_tells_where_words_start(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, words = (TokenStore.open(home / name) for name in ("plain", "words"))
    assert not plain.facts.word_starts and words.facts.word_starts
    assert plain.ids(0, plain.facts.tokens).tolist() == words.ids(0, words.facts.tokens).tolist()
    assert words.facts.notes[FOUND] > words.facts.notes[INSIDE] > 0
    starts = int(words.word_starts(0, words.facts.tokens).sum())
    assert starts == words.facts.notes[FOUND] + words.facts.documents
    assert words.facts.fingerprint != plain.facts.fingerprint
    assert verify(home / "words") == []
    assert exit_code("store", "info", home / "words") == 0
    shown = capsys.readouterr().out
    assert 'mecab {"dictionary":"unidic_lite"' in shown.replace("\n", "") and FOUND in shown


def test_masks_are_whole_words(home: Path) -> None:
    objective = plugins.registry().component("objectives", "masked_lm").model_validate({"mlm_probability": 0.4})
    store = TokenStore.open(home / "words")
    tokenizer = AutoTokenizer.from_pretrained(home / "bytes")
    rows = sample_masked(store, tokenizer, objective, rows=4, sequence_length=96, seed=3)
    tokens = [token for row in rows for token in row]
    predicted = [token.marking != "none" for token in tokens]
    assert any(predicted) and not all(predicted)
    inside = [number for number, token in enumerate(tokens) if not token.starts_word]
    assert len(inside) > 50 and all(predicted[number] == predicted[number - 1] for number in inside)


def test_the_command_prints_how_many_borders_it_found(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = json.dumps({"type": "spaces", "punctuation": False})
    arguments = [str(home / "corpus.txt"), "--tokenizer", str(home / "bytes"), "--processes", "1", "--words", words]
    assert exit_code("prepare", *arguments, "--out", home / "spaces") == 0
    facts = TokenStore.open(home / "spaces").facts
    total = facts.notes[FOUND] + facts.notes[INSIDE]
    text = f"{total:,} borders between words: {facts.notes[FOUND]:,} ({100 * facts.notes[FOUND] / total:.2f} %)"
    assert text in " ".join(capsys.readouterr().err.split())
    assert facts.options["words"] == 'spaces {"punctuation":false}'


def test_shards_with_words_are_the_store_of_one_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terakoya.preparation.job._MIN_BLOCK", 2000)
    make(home, "whole", words="mecab")
    for number in (1, 2):
        make(home, f"shard{number}", words="mecab", shard=f"{number}/2")
    merge([home / "shard1", home / "shard2"], home / "merged")
    for name in ("tokens.words", "store.json"):
        assert (home / "merged" / name).read_bytes() == (home / "whole" / name).read_bytes(), name


def test_a_store_with_other_words_is_another_store(home: Path) -> None:
    make(home, "words", words={"type": "mecab"})
    with pytest.raises(UserError, match=r"changed: options, words \(words.normalize_text: was True, is now False\)"):
        make(home, "words", words={"type": "mecab", "normalize_text": False})
    with pytest.raises(UserError, match=r"changed: options, words \(words: was mecab, is now nothing\)"):
        make(home, "words")


def test_stores_with_other_words_are_not_mixed(home: Path) -> None:
    with pytest.raises(UserError, match=r"word starts: expected known as in .*merge without them: --no-word-starts"):
        merge([home / "words", home / "plain"], home / "both")
    make(home, "spaced", words="spaces")
    with pytest.raises(UserError, match=r"words: expected mecab .*, got spaces .*--no-word-starts"):
        merge([home / "words", home / "spaced"], home / "both")
    layout = Layout(kind="stream")
    sources = [
        RowSource(TokenStore.open(home / name), layout, sequence_length=32, seed=0, store_id=number)
        for number, name in enumerate(("words", "plain"))
    ]
    with pytest.raises(UserError, match="expected word starts in both or neither"):
        Loader(sources, [1.0, 1.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"words": "mecap"}, r'mecap.*did you mean "mecab"'),
        (
            {"words": {"type": "mecab", "dictionery": "ipadic"}},
            'words mecab: dictionery: unknown key; did you mean "dict',
        ),
        ({"words": {"dictionary": "ipadic"}}, 'words.type: expected a name such as "mecab", got None'),
        ({"words": {"type": "mecab", "dictionary": "nowhere"}}, 'expected a name or a folder, got "nowhere"'),
        ({"words": "mecab", "conversations": True}, "leave it out with --conversations"),
    ],
)
def test_what_cannot_be_meant_is_refused(home: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(home, "refused", **options)
    assert not (home / "refused" / "store.json").exists()


def test_a_tokenizer_that_knows_words_takes_no_others(home: Path, tmp_path: Path) -> None:
    from terakoya.corpus.corpus import Corpus
    from terakoya.preparation.job import PrepareJob
    from terakoya.preparation.local import prepare_locally
    from terakoya.preparation.options import PrepareOptions
    from terakoya.preparation.word_borders import find_word_finder

    folder = make_folder(tmp_path / "tokenizer")
    corpus = Corpus([home / "corpus.txt"])
    options = PrepareOptions(sources=corpus.sources, tokenizer=folder, out=tmp_path / "out", processes=1)
    job = PrepareJob.create(options, corpus, WordTokenizer(), words=find_word_finder("spaces"))
    with pytest.raises(
        UserError, match=r"--words: expected a tokenizer that tells .* its own words; leave --words out"
    ):
        prepare_locally(job)


def test_a_pipeline_prepares_the_store_with_its_words(home: Path) -> None:
    file = home / "pipeline.json"
    folders = {key: str(home / "out" / key) for key in ("store", "run", "export")}
    keys = {
        "corpus": str(home / "corpus.txt"),
        "tokenizer_folder": str(home / "bytes"),
        "parameters": "tiny_bert",
        **folders,
    }
    file.write_text(json.dumps({**keys, "words": {"type": "spaces"}}), encoding="utf-8")
    pipeline = read_pipeline(file)
    corpus = PipelineCorpus(pipeline.sources[0], pipeline)
    corpus.check()
    assert corpus.store_inputs("train")["words"] == {"type": "spaces"}
    corpus.prepare("train")
    assert str(TokenStore.open(home / "out" / "store").facts.options["words"]).startswith("spaces ")
    file.write_text(json.dumps({**keys, "words": "space"}), encoding="utf-8")
    with pytest.raises(UserError, match=r'space.*did you mean "spaces"'):
        PipelineCorpus(pipeline.sources[0], read_pipeline(file)).check()


def test_a_pipeline_names_a_word_finder_and_its_settings() -> None:
    schema = schema_of("pipeline", plugins.registry())
    choices = json.dumps(schema["properties"]["words"])
    assert '"string"' in choices and "word_finders_mecab" in choices
    assert "normalize_text" in schema["$defs"]["word_finders_mecab"]["properties"]
