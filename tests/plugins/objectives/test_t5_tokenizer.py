"""Span corruption with a tokenizer of T5's own class gives what T5's recipe in Transformers gives."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import t5_tokenizer
import torch
import toy
from packed_rows import corrupted_documents
from small_preparation import prepare_corpus
from texts import write_texts
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerBase, T5ForConditionalGeneration

from terakoya.commands.guidance.next_command import after_model, preset_for
from terakoya.components import Batch
from terakoya.components.rows import Rows
from terakoya.components.vocabulary import Vocabulary, sentinel_ids
from terakoya.config.parameters import Parameters
from terakoya.conversion.export import build_models, export
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.rows.row_source import RowSource
from terakoya.runs import checkpoints
from terakoya.runs.finding import find_checkpoint
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import attention
from terakoya.training.setup import train_in_this_process
from terakoya_plugins.objectives.masked_lm import MaskedLM
from terakoya_plugins.objectives.span_corruption import SpanCorruption
from terakoya_plugins.tokenizers.huggingface import HuggingFace

WORDS = [f"{first}{second}" for first in ("ka", "mi", "to", "ne", "ru") for second in ("sa", "yo", "hi", "no")]
LENGTH = 48
MODEL = {"type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """60 documents of 5 to 40 words."""
    root = tmp_path_factory.mktemp("t5")
    draw = random.Random(5)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(5, 40))) for _ in range(60)]
    corpus, tokenizer = write_texts(root / "corpus.jsonl", texts), t5_tokenizer.make_folder(root / "tokenizer", WORDS)
    prepare_corpus(corpus, HuggingFace(), tokenizer, root / "store", unit="document")
    return TokenStore.open(root / "store")


@pytest.fixture(scope="module")
def tokenizer(store: TokenStore) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(store.tokenizer_folder, local_files_only=True)


def corrupted(store: TokenStore, objective: SpanCorruption) -> tuple[Rows, Batch]:
    """All rows of `store`, before and after."""
    objective.check(store.facts.vocabulary, sequence_length=LENGTH)
    source = RowSource(store, objective.row_layout(), sequence_length=LENGTH, seed=3)
    rows = source.load(0, np.arange(len(source)))
    return rows, objective.collate(rows, store.facts.vocabulary)


def test_inputs_and_labels_are_those_of_the_published_recipe(
    store: TokenStore, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Per document: the tokenizer's own row with each span replaced by <extra_id_0>, <extra_id_1>, ...; the spans after
    these, and </s>; and the decoder's input is what Transformers makes of the labels."""
    sentinels = tokenizer.convert_tokens_to_ids([f"<extra_id_{number}>" for number in range(100)])
    assert sentinels == sorted(sentinels, reverse=True)
    texts = [json.loads(line)["text"] for line in (store.folder.parent / "corpus.jsonl").read_text().splitlines()]
    whole = {tuple(tokenizer(text).input_ids) for text in texts}
    parameters = Parameters.from_dict(toy.parameters(store.folder, architecture=MODEL), source="test")
    reference = T5ForConditionalGeneration(parameters.architecture.config(store.facts.vocabulary))
    restored = set()
    for tokens, source, decoder_input, labels in corrupted_documents(*corrupted(store, SpanCorruption())):
        assert source[-1] == labels[-1] == tokenizer.eos_token_id
        used = [token for token in labels if token in sentinels]
        assert used == sentinels[: len(used)] == [token for token in source if token in sentinels] and used
        spans: dict[int, list[int]] = {}
        for token in labels[:-1]:
            if token in sentinels:
                spans[token] = []
            else:
                spans[list(spans)[-1]].append(token)
        original = [each for token in source for each in spans.get(token, [token])]
        assert original == tokens and original.count(tokenizer.eos_token_id) == 1
        restored.add(tuple(original))
        assert decoder_input == reference._shift_right(torch.tensor([labels]))[0].tolist()
        assert decoder_input[0] == reference.config.decoder_start_token_id == tokenizer.pad_token_id
    short = {row for row in whole if len(row) <= LENGTH}
    assert len(short) > 50 and short <= restored


@pytest.mark.parametrize("layout", ["stream", "lines"])
def test_other_layouts_use_the_same_end_and_lose_no_token(store: TokenStore, layout: str) -> None:
    if layout == "lines":
        store = TokenStore.open(lines_of(store))
    rows, batch = corrupted(store, SpanCorruption(layout=layout))  # type: ignore[arg-type]
    kept = rows.tokens[~store.facts.vocabulary.is_special[rows.tokens]]
    assert np.array_equal(np.sort(kept), np.sort(store.tokens))
    for tokens, source, _, labels in corrupted_documents(rows, batch):
        assert tokens[-1] == source[-1] == labels[-1] == store.facts.vocabulary.eos
        assert len(tokens) <= LENGTH


def lines_of(store: TokenStore) -> Path:
    """The same documents as a store of lines."""
    folder = store.folder.with_name("lines")
    corpus = Corpus([store.folder.with_name("corpus.jsonl")])
    prepare_corpus(corpus, HuggingFace(), store.tokenizer_folder, folder, unit="line")
    return folder


def test_a_run_on_the_store_exports_what_plain_transformers_loads(
    store: TokenStore, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = toy.parameters(store.folder, architecture=MODEL, objective={"type": "span_corruption"}, max_steps=2)
    settings["data"]["sequence_length"] = LENGTH
    train_in_this_process(Parameters.from_dict(settings, source="test"), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "model")
    after_model(tmp_path / "model")
    assert "<extra_id_0>" in capsys.readouterr().err
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    text = "kasa miyo <extra_id_0> nehi <extra_id_1>"
    assert loaded(text).input_ids == tokenizer(text).input_ids
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model", local_files_only=True).eval()
    config = model.config
    assert (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == (0, 1, 0)
    assert config.vocab_size == len(tokenizer)

    folder = find_checkpoint(tmp_path / "run")
    ours = build_models(folder, checkpoints.read_manifest(folder))[""].eval()
    attention.use(ours, "sdpa")
    architecture = Parameters.from_dict(settings, source="test").architecture
    rows, batch = corrupted(store, SpanCorruption())
    tensors = {name: torch.from_numpy(array[:4]) for name, array in batch.arrays.items()}
    with torch.no_grad():
        packed = architecture.logits(ours, architecture.hidden(ours, tensors))
        compared = 0
        for row in range(4):
            for number in range(rows.document_ids[row].max() + 1):
                source = tensors["input_ids"][row][tensors["document_ids"][row] == number]
                target = tensors["decoder_document_ids"][row] == number
                alone = model(input_ids=source[None], labels=tensors["labels"][row][target][None]).logits[0]
                assert (alone - packed[row][target]).abs().max() < 1e-5
                compared += 1
    assert compared >= 4


def test_a_run_starts_from_a_model_whose_embeddings_are_padded(
    store: TokenStore, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the published T5, which has 32,128 embeddings for 32,100 ids."""
    settings = toy.parameters(store.folder, architecture=MODEL, objective={"type": "span_corruption"})
    settings |= {"start_from": str(tmp_path / "published"), "max_steps": 1}
    settings["optimizer"]["learning_rate"] = 1e-30
    config = Parameters.from_dict(settings, source="test").architecture.config(store.facts.vocabulary)
    config.vocab_size = len(tokenizer) + 28
    published = T5ForConditionalGeneration(config)
    published.save_pretrained(tmp_path / "published")
    with pytest.raises(UserError, match="its vocabulary has 165 entries, the stores' 137"):  # whose ids may be others
        train_in_this_process(Parameters.from_dict(settings, source="test"), tmp_path / "refused")
    tokenizer.save_pretrained(tmp_path / "published")
    train_in_this_process(Parameters.from_dict(settings, source="test"), tmp_path / "run")
    assert "its last 28 embeddings belong to no token; they are left out" in "".join(capsys.readouterr())
    folder = find_checkpoint(tmp_path / "run")
    ours = build_models(folder, checkpoints.read_manifest(folder))[""].state_dict()
    assert ours["shared.weight"].shape == (len(tokenizer), 16)
    assert all(torch.equal(value, published.state_dict()[name][: len(value)]) for name, value in ours.items())


def test_sentinels_follow_their_numbers_and_other_special_tokens_are_none() -> None:
    pieces = {"<pad>": 0, "[INST]": 1, "<extra_id_10>": 2, "<extra_id_2>": 3, "<extra_id_0>": 9, "a": 5}
    assert sentinel_ids(pieces) == (9, 3, 2)
    assert sentinel_ids({"\u2581<extra_id_1>": 7, "\u2581<extra_id_0>": 8, "[unused0]": 1}) == (8, 7)
    assert sentinel_ids({"[unused10]": 1, "[unused9]": 2, "<unused0>": 3, "[INST]": 4}) == (3, 2, 1)
    assert sentinel_ids({"[INST]": 4}) == ()
    chat = Vocabulary(size=50, pad=0, eos=1, special=tuple(range(40)), sentinels=())
    with pytest.raises(UserError, match=r"needs up to 2 sentinel tokens.*there are 0\..*objective\.sentinels"):
        SpanCorruption().check(chat, sequence_length=48)
    SpanCorruption(sentinels=(7, 9)).check(chat, sequence_length=48)


def test_a_store_without_recorded_sentinels_keeps_its_fingerprint() -> None:
    older = Vocabulary(size=50, pad=0, special=(0, 1))
    assert "sentinels" not in older.model_dump() and "sentinels" not in json.loads(older.model_dump_json())
    assert Vocabulary.model_validate(older.model_dump()) == older
    newer = older.model_copy(update={"sentinels": ()})
    assert Vocabulary.model_validate_json(newer.model_dump_json()) == newer != older


def test_an_encoder_still_needs_cls_and_sep(store: TokenStore) -> None:
    with pytest.raises(UserError, match="layout packed: expected a vocabulary with a cls token"):
        RowSource(store, MaskedLM().row_layout(), sequence_length=LENGTH, seed=3)


def test_prepare_names_a_preset_of_t5(store: TokenStore) -> None:
    assert preset_for(store.facts) == "tiny_t5"
