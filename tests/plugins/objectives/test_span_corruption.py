"""Span corruption: targets restore the text, spans follow the paper, losses equal those of Transformers' T5."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import corrupted_documents
from transformers import T5ForConditionalGeneration

from terakoya.components.rows import Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.toolkit.architectures import attention
from terakoya_plugins.architectures.bert import Bert
from terakoya_plugins.architectures.t5 import T5
from terakoya_plugins.objectives.span_corruption import SpanCorruption
from terakoya_plugins.objectives.span_corruption.rows import noise_and_spans
from terakoya_plugins.tokenizers.byte_bpe import ByteBpe
from terakoya_plugins.tokenizers.sentencepiece import SentencePiece

PAD, CLS, SEP = 0, 2, 3
SENTINELS = tuple(range(5, 45))
VOCABULARY = Vocabulary(size=400, pad=PAD, unk=1, cls=CLS, sep=SEP, mask=4, special=tuple(range(45)))
MODEL = T5(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0)


def make_rows(lengths: list[list[int]], width: int = 64, *, key: int = 1, special: float = 0.0) -> Rows:
    """Packed rows: each inner list holds the lengths of a row's documents, including [CLS] and [SEP]; a share `special`
    of the tokens between these is [UNK]."""
    generator = np.random.default_rng(3)
    tokens = np.full((len(lengths), width), PAD, np.int32)
    documents = np.full((len(lengths), width), -1, np.int32)
    positions = np.zeros((len(lengths), width), np.int32)
    for row, documents_of_row in enumerate(lengths):
        at = 0
        for number, length in enumerate(documents_of_row):
            body = generator.integers(45, 400, length - 2)
            body[generator.random(length - 2) < special] = 1
            tokens[row, at : at + length] = [CLS, *body, SEP]
            documents[row, at : at + length] = number
            positions[row, at : at + length] = np.arange(length)
            at += length
    return Rows(
        tokens=tokens, document_ids=documents, position_ids=positions, word_starts=None,
        keys=np.arange(key, key + len(lengths), dtype=np.uint64),
    )  # fmt: skip


def restore(source: list[int], labels: list[int]) -> list[int]:
    """The document: `source` with each sentinel replaced by its span in `labels`."""
    spans: dict[int, list[int]] = {}
    assert not labels or labels[-1] == SEP
    for token in labels[:-1]:
        if token in SENTINELS:
            assert token not in spans
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    assert list(spans) == list(SENTINELS[: len(spans)]) == [token for token in source if token in SENTINELS]
    return [each for token in source for each in spans.get(token, [token])]


lengths = st.lists(st.lists(st.integers(2, 20), max_size=3), min_size=1, max_size=4)


@settings(max_examples=60)
@given(lengths, st.floats(0.05, 0.9), st.floats(1.0, 5.0), st.integers(0, 2**40), st.sampled_from([0.0, 0.3]))
def test_the_targets_restore_the_document(
    shape: list[list[int]], density: float, span: float, key: int, special: float
) -> None:
    rows = make_rows(shape, key=key, special=special)
    objective = SpanCorruption(noise_density=density, mean_noise_span_length=span)
    batch = objective.collate(rows, VOCABULARY)
    for tokens, source, decoder_input, labels in corrupted_documents(rows, batch):
        assert restore(source, labels) == tokens
        assert decoder_input == ([PAD, *labels[:-1]] if labels else [])
    assert batch.counts["targets"] == sum(len(labels) for *_, labels in corrupted_documents(rows, batch))
    padding = batch.arrays["decoder_document_ids"] < 0
    assert (batch.arrays["labels"][padding] == -100).all() and (batch.arrays["labels"][~padding] >= 0).all()


def test_numbers_of_tokens_and_spans_follow_the_paper() -> None:
    rows = make_rows([[64], [34, 30], [12, 2, 3, 4]])
    batch = SpanCorruption().collate(rows, VOCABULARY)
    found = []
    for tokens, source, _, labels in corrupted_documents(rows, batch):
        spans = sum(token in SENTINELS for token in source)
        noise = len(labels) - spans - bool(labels)
        found.append((len(tokens) - 2, noise, spans))
        # spans never touch: no sentinel follows another
        assert not any(a in SENTINELS and b in SENTINELS for a, b in pairwise(source))
    assert found == [(62, 9, 3), (32, 5, 2), (28, 4, 1), (10, 2, 1), (0, 0, 0), (1, 0, 0), (2, 1, 1)]
    assert [each.tolist() for each in noise_and_spans(np.array([510]), 0.15, 3.0)] == [[77], [26]]


def test_all_positions_of_a_span_are_equally_likely() -> None:
    """One span of 2 among 8 tokens has 7 positions."""
    rows = make_rows([[10]] * 4000, 16)
    arrays = SpanCorruption(noise_density=0.25, mean_noise_span_length=2.0).collate(rows, VOCABULARY).arrays
    sentinel = arrays["input_ids"].tolist()
    first = np.array([row.index(SENTINELS[0]) for row in sentinel])
    counts = np.bincount(first - 1, minlength=7)
    assert counts.sum() == 4000 and (abs(counts - 4000 / 7) < 5 * (4000 / 7) ** 0.5).all()


def test_special_tokens_stay_and_split_a_span() -> None:
    rows = make_rows([[60]], special=0.4)
    batch = SpanCorruption(noise_density=0.6, mean_noise_span_length=5.0).collate(rows, VOCABULARY)
    ((tokens, source, _, labels),) = corrupted_documents(rows, batch)
    assert source.count(1) == tokens.count(1) > 5 and 1 not in labels
    assert sum(token in SENTINELS for token in source) > 7


def test_spans_after_the_last_sentinel_stay() -> None:
    """Special tokens may split spans into more than a row of that length has otherwise."""
    rows = make_rows([[60], [30, 30]], special=0.4)
    objective = SpanCorruption(noise_density=0.6, mean_noise_span_length=5.0, sentinels=SENTINELS[:3])
    for tokens, source, _, labels in corrupted_documents(rows, objective.collate(rows, VOCABULARY)):
        assert restore(source, labels) == tokens
        assert sum(token in SENTINELS for token in source) == 3


def test_the_corruption_of_a_row_depends_on_its_key_and_not_on_other_rows() -> None:
    rows = make_rows([[30, 20], [50], [64]])
    batch = SpanCorruption().collate(rows, VOCABULARY)
    alone = SpanCorruption().collate(make_rows([[30, 20]]), VOCABULARY)
    assert np.array_equal(batch.arrays["input_ids"][:1], alone.arrays["input_ids"])
    other = SpanCorruption().collate(make_rows([[30, 20]], key=9), VOCABULARY)
    assert not np.array_equal(other.arrays["input_ids"], alone.arrays["input_ids"])


def test_too_few_sentinels_are_refused_with_the_remedy() -> None:
    few = VOCABULARY.model_copy(update={"special": tuple(range(15))})
    SpanCorruption().check(few, sequence_length=200)
    with pytest.raises(
        UserError,
        match=r"a row of 512 tokens needs up to 26 sentinel tokens.*there are 10.*num_unused.*control_symbols",
    ):
        SpanCorruption().check(few, sequence_length=512)
    SpanCorruption().check(VOCABULARY, sequence_length=512)


def test_what_the_remedy_names_gives_sentencepiece_and_byte_bpe_sentinels() -> None:
    names = tuple(f"<extra_id_{number}>" for number in range(26))
    for tokenizer in (
        SentencePiece(vocab_size=99, control_symbols=names, pad_id=3),
        ByteBpe(vocab_size=400, additional_special_tokens=names),
    ):
        SpanCorruption().check(tokenizer.planned_vocabulary(), sequence_length=512)


def test_given_sentinels_are_used_in_their_order() -> None:
    named = tuple(reversed(SENTINELS))
    batch = SpanCorruption(sentinels=named).collate(make_rows([[64]]), VOCABULARY)
    found = [token for token in batch.arrays["input_ids"][0].tolist() if token in SENTINELS]
    assert found == list(named[: len(found)]) and len(found) == 3
    for wrong in ((100,), (SEP,)):
        with pytest.raises(UserError, match=f"without another meaning, got {wrong[0]}"):
            SpanCorruption(sentinels=wrong).collate(make_rows([[64]]), VOCABULARY)
    with pytest.raises(UserError, match="each id once"):
        SpanCorruption(sentinels=(5, 5)).collate(make_rows([[64]]), VOCABULARY)


def test_an_encoder_is_refused() -> None:
    with pytest.raises(UserError, match="Bert has no head 'seq2seq'"):
        SpanCorruption().build(Bert(hidden_size=8, num_attention_heads=2), VOCABULARY)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("projection", ["relu", "gated-gelu"])
def test_loss_and_gradients_equal_those_of_transformers_on_separate_documents(backend: str, projection: str) -> None:
    """Packed rows against separate documents in plain Transformers, which builds the decoder's input itself."""
    model = MODEL.model_copy(update={"feed_forward_proj": projection})
    rows = make_rows([[30, 12, 20], [64], [5, 40]])
    objective = SpanCorruption()
    torch.manual_seed(0)
    module = objective.build(model, VOCABULARY)
    attention.use(module, backend)
    batch = objective.collate(rows, VOCABULARY)
    ours = module({name: torch.from_numpy(array) for name, array in batch.arrays.items()})["span_loss"]
    ours.backward()

    reference = T5ForConditionalGeneration(model.config(VOCABULARY))
    reference.load_state_dict(module.model.state_dict())
    total = torch.zeros(())
    for _, source, _, labels in corrupted_documents(rows, batch):
        loss = reference(input_ids=torch.tensor([source]), labels=torch.tensor([labels])).loss
        total = total + loss * len(labels)
    total.backward()
    assert abs(float(ours.detach()) - float(total.detach())) / float(total.detach()) < 1e-6
    for (name, mine), theirs in zip(module.model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad - theirs.grad).norm() / (theirs.grad.norm() + 1e-12) < 1e-4, name


def test_replaced_tokens_are_scored_without_sentinels_and_end_tokens() -> None:
    """What bits per character are made of, against the log-probabilities of plain Transformers."""
    rows, objective = make_rows([[30, 12, 20], [64]], special=0.1), SpanCorruption()
    torch.manual_seed(0)
    module = objective.build(MODEL, VOCABULARY).eval()
    attention.use(module, "sdpa")
    batch = objective.collate(rows, VOCABULARY)
    with torch.no_grad():
        sums = module({name: torch.from_numpy(array) for name, array in batch.arrays.items()})
    reference = T5ForConditionalGeneration(MODEL.config(VOCABULARY)).eval()
    reference.load_state_dict(module.model.state_dict())
    total, replaced = 0.0, 0
    for _, source, _, labels in corrupted_documents(rows, batch):
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([source]), labels=torch.tensor([labels])).logits[0]
        scores = -logits.log_softmax(-1)[range(len(labels)), labels]
        text = [place for place, label in enumerate(labels) if label not in SENTINELS and label != SEP]
        total, replaced = total + float(scores[text].sum()), replaced + len(text)
    assert batch.counts["replaced"] == replaced < batch.counts["targets"]
    assert float(sums["replaced_loss"]) == pytest.approx(total, rel=1e-5)
    assert objective.terms()["replaced_loss"].bits == "masked_bits"
    assert "replaced_loss" not in module.train()({n: torch.from_numpy(each) for n, each in batch.arrays.items()})
