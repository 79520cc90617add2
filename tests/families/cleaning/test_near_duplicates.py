"""Near duplicates: sketches estimate the exact similarity; what is dropped depends on the documents alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from terakoya_cleaning import near_duplicates, sketches
from terakoya_cleaning.near_duplicates import Layout, find_near_duplicates
from terakoya_cleaning.notes import ArraysOnDisk, save_array
from terakoya_cleaning.sketches import sketch_text

SIZE = 512


def drawn(seed: int, size: int) -> str:
    return "".join(random.Random(seed).choices("日月火水木金土山川田人口目耳手足力気天空雨花草虫犬竹糸貝車町", k=size))


def jaccard(one: str, other: str) -> float:
    """By sets, without a hash."""
    first, second = ({each[place : place + 5] for place in range(len(each) - 4)} for each in (one, other))
    return len(first & second) / len(first | second)


def sketch(text: str, bits: int = 8) -> np.ndarray:
    return sketch_text(text, size=SIZE, characters=5, bits=bits)


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("size", [30, 300, 3000])
def test_equal_values_estimate_the_exact_similarity(size: int, bits: int) -> None:
    """Without bias, and as closely as so many independent values do."""
    errors = []
    for seed in range(60):
        one = drawn(seed, size)
        other = one[: size * 9 // 10] + drawn(seed + 1000, size // 10)
        values = [sketch(text, bits).view(f"<u{bits // 8}") for text in (one, other)]
        chance = 2.0**-bits
        errors.append((np.mean(values[0] == values[1]) - chance) / (1 - chance) - jaccard(one, other))
    deviation = (0.8 * 0.2 / SIZE) ** 0.5
    assert abs(np.mean(errors)) < 3 * deviation / 60**0.5
    assert np.std(errors) < 1.2 * deviation


@pytest.mark.parametrize(("one", "other"), [
    ("strtol", "strtok"), ("ABC1", "ABC3"), ("商品番号1", "商品番号2"), ("今日は良い天気です1", "今日は良い天気です4"),
])  # fmt: skip
def test_neighbouring_last_characters_are_different_characters(one: str, other: str) -> None:
    values = [sketch(text, 16).view("<u2") for text in (one, other)]
    similarity = jaccard(one, other) if len(one) > 4 else 0.0
    assert np.mean(values[0] == values[1]) == pytest.approx(similarity, abs=4 * (0.25 / SIZE) ** 0.5)


def test_sketches_are_the_same_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        "",
        " \n",
        "一",
        "一二三",
        "一二三四五",
        "ab cd\nef",
        "𠮷野家" * 20,
        "あ" * 50,
        drawn(0, 40),
        drawn(1, 9000),
    ]
    whole = [sketch(text) for text in texts]
    assert sketches._kernels() is not None, "needs a C compiler"
    monkeypatch.setattr(sketches, "_kernels", lambda: None)
    assert all(np.array_equal(sketch(text), each) for text, each in zip(texts, whole, strict=True))
    assert np.array_equal(whole[5], sketch("abcd ef"))


@pytest.mark.parametrize("threshold", [0.2, 0.3, 0.5, 0.7, 0.75, 0.8, 0.95])
def test_a_layout_finds_what_is_at_its_threshold(threshold: float) -> None:
    layout = Layout.of(threshold, SIZE)
    rows = 64 // layout.bits
    assert layout.bands * rows <= SIZE
    assert 1 - (1 - threshold**rows) ** layout.bands >= 0.995
    assert 0.7 * threshold < layout.equal / SIZE < threshold


def corpus(parts: int) -> tuple[list[np.ndarray], np.ndarray, list[str]]:
    """Groups of similar texts, of which some are `left` out, in parts of different sizes."""
    texts = []
    for number in range(400):
        original = drawn(number % 150, 200)
        place = number % 190
        texts.append(original[:place] + drawn(number, 1 + number % 7) + original[place + 1 + number % 7 :])
    random.Random(0).shuffle(texts)
    texts[7:9] = texts[5:7] = ["", "短"]
    left = np.arange(len(texts)) % 13 != 3
    return np.array_split(np.stack([sketch(each) for each in texts]), parts), left, texts


def compare_all(texts: list[str], left: np.ndarray, layout: Layout) -> set[int]:
    """Each text with all before it that stay, by whole sketches."""
    values = [sketch(each).view("u1") for each in texts]
    kept: list[int] = []
    dropped = set()
    for number in np.flatnonzero(left).tolist():
        if any(np.count_nonzero(values[number] == values[other]) >= layout.equal for other in kept):
            dropped.add(number)
        else:
            kept.append(number)
    return dropped


def test_what_is_dropped_is_what_a_comparison_of_all_pairs_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.of(0.8, SIZE)
    whole, left, texts = corpus(1)
    expected = compare_all(texts, left, layout)
    assert len(expected) > 150
    found = find_near_duplicates(whole, left, layout)
    assert set(found.tolist()) == expected
    monkeypatch.setattr(near_duplicates, "_KEYS_AT_ONCE", 10)
    monkeypatch.setattr(near_duplicates, "_PAIRS_AT_ONCE", 3)
    monkeypatch.setattr(near_duplicates, "_BANDS_AT_ONCE", 2)
    assert np.array_equal(find_near_duplicates(corpus(9)[0], left, layout), found)
    assert not len(find_near_duplicates([], np.zeros(0, bool), layout))


def test_a_document_is_compared_with_each_of_its_group_that_stays() -> None:
    """The third shares one band with both, and more values with the second alone."""
    sketches = np.random.default_rng(0).integers(0, 1 << 62, (2, 64), np.uint64)
    sketches[1, 3] = sketches[0, 3]
    third = sketches[1] ^ np.where(np.arange(64) == 3, np.uint64(0), np.uint64(255))
    parts = [sketches, third[None]]
    assert find_near_duplicates(parts, np.ones(3, bool), Layout.of(0.8, SIZE)).tolist() == [2]
    assert not len(find_near_duplicates(parts, np.array([True, False, True]), Layout.of(0.8, SIZE)))


def test_an_interrupted_comparison_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.of(0.8, SIZE)
    parts, left, _ = corpus(3)
    expected = find_near_duplicates(parts, left, layout)
    for number, part in enumerate(parts):
        save_array(tmp_path / f"{number:06d}.note1", part)
    notes = ArraysOnDisk(tmp_path, ".note1")
    read: list[int] = []
    read_bands = near_duplicates._read_bands

    def interrupted(sketches: object, kept: np.ndarray, bands: slice, bits: np.uint64) -> np.ndarray:
        read.append(bands.start)
        if len(read) == 3:
            raise KeyboardInterrupt
        return read_bands(notes, kept, bands, bits)

    monkeypatch.setattr(near_duplicates, "_read_bands", interrupted)
    with pytest.raises(KeyboardInterrupt):
        find_near_duplicates(notes, left, layout, progress=notes.progress)
    assert np.array_equal(find_near_duplicates(notes, left, layout, progress=notes.progress), expected)
    assert read == [0, 5, 10, 10, 15, 20, 25]


def test_a_group_of_many_that_are_alike_in_one_band_only_takes_no_square(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.of(0.8, SIZE)
    parts = np.random.default_rng(0).integers(0, 1 << 62, (3000, 64), np.uint64)
    parts[:, 4] = 1
    parts[-1] = parts[0]
    compared: list[int] = []
    read_sketches = near_duplicates._read_sketches

    def counted(sketches: list[np.ndarray], ends: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        compared.append(len(pairs))
        return read_sketches(sketches, ends, pairs)

    monkeypatch.setattr(near_duplicates, "_read_sketches", counted)
    assert find_near_duplicates([parts], np.ones(3000, bool), layout).tolist() == [2999]
    assert sum(compared) < 64 * 3000 + 100
