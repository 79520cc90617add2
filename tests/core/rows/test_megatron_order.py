"""Megatron-LM's order: the published rule, in plain loops over samples, gives the same rows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_store import small_store

from terakoya.components.rows import Layout
from terakoya.errors import UserError
from terakoya.rows.megatron_order import MegatronOrder
from terakoya.rows.row_source import RowSource

EOS = 5


def published(documents: list[list[int]], length: int, samples: int | None, seed: int) -> tuple[list[list[int]], bool]:
    """The samples (of length + 1 ids each) in the order of training, by gpt_dataset.py's description; and whether the
    last epoch is shuffled separately."""
    per_epoch = sum(map(len, documents))
    epochs = 1
    while samples is not None and epochs * per_epoch < samples * length + 1:
        epochs += 1
    separate, without_last = False, 0
    if epochs > 1:
        assert samples is not None
        without_last = ((epochs - 1) * per_epoch - 1) // length
        separate = samples - without_last < int(0.80 * ((per_epoch - 1) // length))
    random = np.random.RandomState(seed)

    def document_index(times: int) -> list[int]:
        index = np.array([number for _ in range(times) for number in range(len(documents))], np.int32)
        random.shuffle(index)
        return index.tolist()

    index = document_index(epochs - 1) + document_index(1) if separate else document_index(epochs)
    joined = [each for number in index for each in documents[number]]
    cut = [joined[at : at + length + 1] for at in range(0, len(joined) - length, length)]
    assert all(len(each) == length + 1 for each in cut)
    first = np.arange(without_last if separate else len(cut), dtype=np.uint32)
    random.shuffle(first)
    order = first.tolist()
    if separate:
        last = np.arange(without_last, len(cut), dtype=np.uint32)
        random.shuffle(last)
        order += last.tolist()
    return [cut[each] for each in order], separate


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(("samples", "separate"), [(None, False), (20, False), (150, True), (170, False), (330, True)])
def test_rows_follow_the_published_rule(tmp_path: Path, stored: bool, samples: int | None, separate: bool) -> None:
    generator = np.random.default_rng(1)
    sizes = [[int(generator.integers(1, 90))] for _ in range(30)]
    store = small_store(tmp_path, sizes, unit="document", eos=EOS if stored else None, words=False)
    store.facts.vocabulary = store.facts.vocabulary.model_copy(update={"eos": EOS})
    bounds = np.cumsum([0] + [size for (size,) in sizes]) + 10
    documents = [[*range(start, stop), EOS] for start, stop in pairwise(bounds)]
    expected, is_separate = published(documents, 16, samples, 1234)
    assert is_separate == separate
    layout = Layout("megatron", framing="causal", samples=samples)
    source = RowSource(store, layout, sequence_length=16, seed=1234)  # type: ignore[arg-type]
    rows = source.load(0, np.arange(len(source)))
    assert rows.labels is not None
    assert rows.tokens.tolist() == [each[:-1] for each in expected]
    assert rows.labels.tolist() == [each[1:] for each in expected]
    assert np.all(rows.document_ids == 0) and np.array_equal(rows.position_ids[0], np.arange(16))


@settings(max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 60), st.integers(0, 2**32 - 1))
@example([29, 42], 17, 1)  # of the second epoch's 10 samples 7 are used: it is shuffled separately
@example([29, 42], 18, 1)  # 8: it is not
def test_any_documents_and_samples(sizes: list[int], samples: int, seed: int) -> None:
    if sum(sizes) < 2:
        return
    order = MegatronOrder(np.array(sizes), sequence_length=7, samples=samples, seed=seed)
    bounds = np.cumsum([0, *sizes])
    documents = [list(range(start, stop)) for start, stop in pairwise(bounds)]
    expected, _ = published(documents, 7, samples, seed)
    assert len(order) == len(expected) >= samples
    starts = order.samples(np.arange(len(order))) * 7
    joined = order.document_at(starts)
    first = bounds[order.in_store(joined)] + starts - order.stream_start(joined)
    assert first.tolist() == [each[0] for each in expected]


def test_a_longer_run_continues_with_the_order_of_the_next_seed() -> None:
    order = MegatronOrder(np.array([30, 50, 20]), sequence_length=7, samples=None, seed=3)
    assert order.of_epoch(0) is order
    following = MegatronOrder(np.array([30, 50, 20]), sequence_length=7, samples=None, seed=4)
    places = np.arange(len(order))
    assert np.array_equal(order.of_epoch(1).samples(places), following.samples(places))


def test_a_seed_too_large_for_numpy_is_refused() -> None:
    with pytest.raises(UserError, match="seed"):
        MegatronOrder(np.array([30]), sequence_length=7, samples=None, seed=1 << 32)
