"""The compiled loops of `terakoya_tokenizer` find the words and the pieces that MeCab and numpy find."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import fugashi
import numpy as np
import pytest
from hard_lines import LINES
from hypothesis import given
from hypothesis import strategies as st
from real_data import real_data
from selection import at_night

from terakoya_tokenizer import kernels as compiled
from terakoya_tokenizer import mecab
from terakoya_tokenizer.kernels import load_kernels
from terakoya_tokenizer.lattice import Lattice
from terakoya_tokenizer.mecab import MecabSplitter, dictionary_folder, dictionary_options
from terakoya_tokenizer.word_cache import LINE_END, WordCache
from terakoya_tokenizer.wordpiece import Pieces

DICTIONARIES = ("unidic_lite", "ipadic")
SAMPLE = "寺子屋では、読み書きとそろばんを習った。"
PIECES = [
    *"。、「」・ー々〆〇ｶﾞﾊﾟがはでにし1９aＺé😀𠮷\t\r\n\0\uffff\ue000\u3099\u200d\ufe0f\u2028\x85\x1c",
    *(
        "  ",
        "　",
        "東京都",
        "すもも",
        "モーニング娘。",
        "New York",
        "ＡＢＣ",
        "3.14",
        "👨‍👩‍👧",
        "とうきょうとっきょきょかきょく",
    ),
]
ANY_LINE = st.lists(
    st.one_of(
        st.sampled_from(PIECES),
        st.tuples(st.sampled_from(PIECES), st.integers(20, 30)).map(lambda pair: pair[0] * pair[1]),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
        st.text(st.characters(min_codepoint=0x3041, max_codepoint=0x30FF), max_size=12),
        st.text(st.characters(min_codepoint=0x4E00, max_codepoint=0x9FA0), max_size=6),
    ),
    max_size=10,
).map("".join)

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C compiler")


@pytest.fixture(scope="module", params=DICTIONARIES)
def splitters(request: pytest.FixtureRequest) -> tuple[MecabSplitter, MecabSplitter]:
    """MeCab, and the splitter that has left it."""
    return both_splitters(dictionary_folder(request.param))


def both_splitters(folder: Path, sample: str = SAMPLE) -> tuple[MecabSplitter, MecabSplitter]:
    plain, quick = MecabSplitter(dictionary_options(folder)), MecabSplitter(dictionary_options(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mecab, "MECAB_CHARACTERS", 0)
        quick.split([sample])
    assert plain._lattice is None and isinstance(quick._lattice, Lattice)
    return plain, quick


@given(lines=st.lists(ANY_LINE, max_size=5))
def test_the_words_of_any_line_are_mecabs(splitters: tuple[MecabSplitter, MecabSplitter], lines: list[str]) -> None:
    plain, quick = splitters
    for each in (lines, list(map(plain.normalize, lines))):
        assert quick.split(each) == plain.split(each)


def test_the_words_of_hard_lines_are_mecabs(splitters: tuple[MecabSplitter, MecabSplitter]) -> None:
    plain, quick = splitters
    cuts = [line[start:] for line in LINES for start in range(0, len(line), 3)]
    groups = [each * count for each in "あアａa1é漢一-。😀" for count in (24, 25, 26, 27)]
    long = ["これは、長い。" * 2_000, "床" * 15_999, "床" * 16_000, "床" * 16_001, "長い行" * 12_000]
    lines = ["", *LINES, *cuts, *groups, *long, ""]
    assert quick.split(lines) == plain.split(lines)
    assert quick._lattice is not None
    left = [line for line, words in zip(lines, quick._lattice.split(lines), strict=True) if words is None]
    assert left and all(len(line) > 16_000 or line[-1].isspace() or set(line) & {"\0", "\uffff"} for line in left)


def test_a_table_of_costs_that_is_too_large_to_be_copied_gives_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terakoya_tokenizer.lattice._LARGEST", 0)
    plain, quick = both_splitters(dictionary_folder("ipadic"))
    assert isinstance(quick._lattice, Lattice) and isinstance(quick._lattice._tables.connection, np.memmap)
    assert quick.split(LINES) == plain.split(LINES)


@pytest.mark.real_data
def test_the_words_of_real_text_are_mecabs(splitters: tuple[MecabSplitter, MecabSplitter]) -> None:
    plain, quick = splitters
    with gzip.open(real_data("ja-medium.val.jsonl.gz"), "rt", encoding="utf-8") as rows:
        lines = [line for row in rows for line in plain.lines(json.loads(row)["text"])]
    assert quick.split(lines) == plain.split(lines)


@pytest.mark.parametrize("seed", at_night(range(12), always=range(3)))
def test_of_equal_paths_mecabs_is_taken(seed: int, tmp_path: Path) -> None:
    """Small dictionaries with costs from -1 to 2: most lines have several best paths."""
    chance = random.Random(seed)
    folder = make_dictionary(tmp_path, chance)
    plain, quick = both_splitters(folder)
    lines = ["".join(chance.choices("あいうアイウ漢字a1 。😀é", k=chance.randrange(60))) for _ in range(400)]
    assert quick.split(lines) == plain.split(lines)
    assert quick._lattice is not None and quick._lattice.split(lines).count(None) < 60


def make_dictionary(folder: Path, chance: random.Random) -> Path:
    """Compiles a dictionary of random words."""
    source, out = folder / "source", folder / "dictionary"
    source.mkdir()
    out.mkdir()
    rights, lefts = chance.randint(2, 4), chance.randint(2, 4)

    def word(surface: str, most: int) -> str:
        return f"{surface},{chance.randrange(lefts)},{chance.randrange(rights)},{chance.randint(0, most)},x\n"

    surfaces = ["".join(chance.choices("あいうアイウ漢字a1。😀é", k=chance.randint(1, 4))) for _ in range(80)]
    categories = ["DEFAULT", "SPACE", "KANJI", "HIRAGANA", "KATAKANA", "ALPHA"]
    ranges = ["0x0020 SPACE", "0x3041..0x3096 HIRAGANA", "0x30A1..0x30FA KATAKANA HIRAGANA", "0x4E00..0x9FFF KANJI"]
    ranges.append("0x0031..0x007A ALPHA KANJI\n")
    flags = [f"{name} {chance.randint(0, 1)} {chance.randint(0, 1)} {chance.randint(0, 3)}\n" for name in categories]
    costs = [f"{right} {left} {chance.randint(-1, 1)}\n" for right in range(rights) for left in range(lefts)]
    texts = {
        "lex.csv": [word(surface, 2) for surface in surfaces],
        "unk.def": [word(name, 4) for name in categories for _ in range(chance.randint(1, 2))],
        "matrix.def": [f"{rights} {lefts}\n", *costs],
        "char.def": [*flags, "\n".join(ranges)],
        "dicrc": ["cost-factor = 700\nbos-feature = BOS\n"],
    }
    for name, lines in texts.items():
        (source / name).write_text("".join(lines), "utf-8")
    fugashi.build_dictionary(f'terakoya -d "{source}" -o "{out}" -f utf8 -t utf8')
    (out / "dicrc").write_text("".join(texts["dicrc"]), "utf-8")
    return out


def test_settings_that_change_words_leave_the_text_to_mecab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mecab, "MECAB_CHARACTERS", 0)
    for file in dictionary_folder("ipadic").iterdir():
        if file.name != "dicrc":
            (tmp_path / file.name).symlink_to(file)
    settings_file = tmp_path / "dicrc"
    usual = dictionary_folder("ipadic").joinpath("dicrc").read_text("utf-8")
    text = ["ABCDEFGHIJ" * 2]
    for more in ("", "max-grouping-size = 3\n"):
        settings_file.write_text(usual + more, "utf-8")
        splitter = MecabSplitter(dictionary_options(tmp_path))
        assert splitter.split(text) == [splitter.parse(text[0])]
        assert (splitter._lattice is None) == bool(more)
    for option in ("-b 8192", "-u x"):
        assert mecab._readable_folder([*("-d", str(tmp_path), "-r", "/dev/null"), *option.split()]) is None


def test_without_a_compiler_mecab_splits_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mecab, "MECAB_CHARACTERS", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(mecab, "load_kernels", load_kernels.__wrapped__)
    splitter = MecabSplitter(dictionary_options(dictionary_folder("ipadic")))
    for _ in range(2):
        assert splitter.split([SAMPLE]) == [splitter.parse(SAMPLE)] and splitter._lattice is None


def test_the_loops_are_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_kernels.__wrapped__() is not None
    monkeypatch.setattr(compiled.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert load_kernels.__wrapped__() is not None
    assert [file.suffix for file in (tmp_path / "terakoya" / "kernels").iterdir()] == [".so"]


@given(
    texts=st.lists(st.lists(st.text("あいう漢😀a\t", max_size=90).filter(bool), max_size=30), min_size=1, max_size=5),
    slot_bits=st.sampled_from([2, 20]),
)
def test_the_cache_finds_the_tokens_that_numpy_finds(texts: Sequence[Sequence[str]], slot_bits: int) -> None:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("terakoya_tokenizer.word_cache._SLOT_BITS", slot_bits)
        for many in (0, 1 << 60):
            patch.setattr("terakoya_tokenizer.word_cache._MANY", many)
            cache = WordCache(every_character, np.dtype(np.int32), max_words=40)
            found.append([cache.encode(" ".join([*words, LINE_END, *words[:3], LINE_END, ""])) for words in texts])
    for quick, plain, words in zip(*found, texts, strict=True):
        assert [each.tolist() for each in quick] == [each.tolist() for each in plain]
        assert quick[0].tolist() == [ord(each) for word in (*words, *words[:3]) for each in word]


def every_character(word: str) -> Pieces:
    places = range(len(word))
    return [ord(each) for each in word], [*places], [place + 1 for place in places]


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders have no owner here")
def test_no_code_is_loaded_from_a_folder_that_others_can_write_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load = load_kernels.__wrapped__  # as in a new process
    assert load() is not None
    (tmp_path / "terakoya" / "kernels").chmod(0o777)
    assert load() is None
