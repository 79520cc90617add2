"""Personal data is masked, counted and shown nowhere; words of a list and text of test sets drop documents."""

from __future__ import annotations

import json
import logging
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from texts import write_texts

from terakoya.corpus.corpus import Corpus
from terakoya.corpus.documents import Document
from terakoya.errors import UserError
from terakoya_cleaning.plan import add_cleaning, make_plan
from terakoya_cleaning.reading import parse_steps
from terakoya_cleaning.rejects import listing_to
from terakoya_screening.code_points import ngram_hashes, normalise
from terakoya_screening.personal_data import is_card_number, is_my_number
from terakoya_screening.steps import Decontaminate, PersonalData, Words
from terakoya_screening.word_list import WordList

SECRETS = ("090-0000-1234", "taro@kaisha.test", "4111 1111 1111 1111", "架空区")
TEXTS = [
    f"短い{SECRETS[0]}",
    f"電話は{SECRETS[0]}、メールは{SECRETS[1]}、住所は東京都{SECRETS[3]}夢見町1-2-3です。",
    f"カードは{SECRETS[2]}です。" + "本文が続きます。" * 10,
    "ISBN 978-4-00-000000-2 の本を2024-01-05に買いました。",
]


def clean(corpus: Corpus, steps: list[dict[str, Any]], folder: Path, *, processes: int = 1) -> list[str]:
    cleaned = add_cleaning(corpus, parse_steps(steps, source="clean"), folder)
    make_plan(cleaned, processes=processes)
    items = (item for block in cleaned.blocks() for item in cleaned.read(block))
    return [item.text for item in items if isinstance(item, Document)]


@pytest.mark.parametrize("action", ["mask", "drop"])
def test_personal_data_is_counted_by_kind_and_shown_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, action: str
) -> None:
    caplog.set_level(logging.INFO, "terakoya")
    steps = [{"type": "length", "min_characters": 20}, {"type": "personal_data", "action": action}]
    with listing_to(tmp_path / "rejects.jsonl", with_text=True):
        kept = clean(write_texts(tmp_path / "a.jsonl", TEXTS), steps, tmp_path / "plan")
    files = [tmp_path / "rejects.jsonl", *(tmp_path / "plan").glob("*.json*")]
    told = caplog.text + "".join(file.read_text(encoding="utf-8") for file in files)
    assert '"text":"短い[PHONE]"' in told
    assert kept[-1] == TEXTS[3]
    if action == "mask":
        assert kept[0] == "電話は[PHONE]、メールは[MAIL]、住所は[ADDRESS]です。"
        assert kept[1].startswith("カードは[CARD_NUMBER]です。本文")
        told += "".join(kept)
    else:
        assert len(kept) == 1
    assert "length dropped 1 of 4 documents" in caplog.text and "短い[PHONE]" in caplog.text
    assert "personal_data found address 1, card_number 1, mail 1, phone 1" in caplog.text
    assert not [secret for secret in SECRETS if secret in told]
    counts = json.loads((tmp_path / "plan" / "plan.json").read_bytes())["counts"]
    assert counts["personal_data found phone"] == 1  # that of the document which was dropped before does not count
    assert clean(write_texts(tmp_path / "a.jsonl", TEXTS), steps, tmp_path / "again", processes=2) == kept
    again = json.loads((tmp_path / "again" / "plan.json").read_bytes())
    assert again["counts"] == counts


def test_kinds_are_chosen() -> None:
    step = PersonalData(kinds=("mail",))
    assert step.change(TEXTS[1]) == TEXTS[1].replace(SECRETS[1], "[MAIL]")
    assert step.count(TEXTS[1]) == {"mail": 1}
    assert PersonalData(action="drop", kinds=("my_number",)).keeps(TEXTS[1])


def test_check_digits() -> None:
    for digits, _ in (("123456789018", "the example of guides"), ("000000000000", "all zeros: the remainder is 0")):
        assert [d for d in "0123456789" if is_my_number(digits[:11] + d)] == [digits[11]]
    for card in ("4111111111111111", "5555555555554444", "378282246310005", "3530111333300000", "30569309025904"):
        valid = [d for d in "0123456789" if is_card_number(card[:-1] + d)]
        assert valid == [card[-1]]
    assert not is_card_number("9111111111111111") and not is_card_number("4901234567894")


@example("ﾊﾞﾅﾅ か\u3099")
@given(st.text(st.one_of(st.characters(), st.sampled_from("ｶﾞﾊﾟか゛が…Ａßﬁ㍿㎡각ΣİA\u3099\u0301"))))
def test_normal_forms_are_those_of_unicode(text: str) -> None:
    codes = normalise(text)
    if "\0" not in text:
        expected = unicodedata.normalize("NFKC", text).casefold()
        assert codes.tobytes().decode("utf-32-le", "surrogatepass") == expected


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 17))
def test_equal_ngrams_have_equal_hashes(values: list[int], width: int) -> None:
    hashes = ngram_hashes(np.array(values, np.uint32), width).tolist()
    grams = [tuple(values[start : start + width]) for start in range(len(values) - width + 1)]
    assert len(hashes) == len(grams) and len(set(zip(grams, hashes, strict=True))) == len(set(grams)) == len(
        set(hashes)
    )


def test_words_are_found_by_the_longest_match_whatever_their_width_and_case() -> None:
    words = WordList(["ばか", "!ばかり", "バカ", "バカ者", "ass", "casino bonus", "死", "Ｑ"])
    assert words.find("ﾊﾞｶ者め、バカ、ばかりか、ばか") == ["バカ者", "バカ", "ばか"]
    assert words.find("ＣＡＳＩＮＯ　Bonus! class Ass") == ["casino bonus", "ass"]
    assert words.find("必死のq") == ["死", "q"]
    assert words.find("") == []


def test_words_drop_from_a_number_and_a_share(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("# 一覧\n\n毒\n#毒見\n", encoding="utf-8")
    step = Words(file=tmp_path / "list.txt", least=2, least_share=0.5)
    assert [step.keeps(text) for text in ("毒", "毒と毒", "毒と毒と 毒", "毒と長い文と毒", "毒見")] == [
        True,
        False,
        False,
        True,
        True,
    ]
    assert step.why("毒と毒") == "words 2"


def test_another_list_is_another_plan(tmp_path: Path) -> None:
    corpus, words = write_texts(tmp_path / "a.jsonl", ["甲の話", "乙の話"]), tmp_path / "list.txt"
    steps = [{"type": "words", "file": str(words)}]
    for word, kept in (("甲", "乙の話"), ("乙", "甲の話")):
        words.write_text(word, encoding="utf-8")
        assert clean(corpus, steps, tmp_path / "plan") == [kept]
    words.unlink()
    with pytest.raises(UserError, match=r"list\.txt: no such file"):
        clean(corpus, steps, tmp_path / "plan")


def test_text_of_test_sets_is_found_by_name_of_the_suite(tmp_path: Path) -> None:
    question = "日本の山でいちばん高いものはどれでその高さは何メートルか"
    short = "日本でいちばん高い山は何か"
    jnli = tmp_path / "data" / "jnli-v1.3"
    jnli.mkdir(parents=True)
    rows = [{"sentence1": question, "sentence2": short, "label": "neutral"}]
    (jnli / "valid-v1.3.json").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    step = Decontaminate(tasks=("jnli",), data=tmp_path / "data")
    found = [
        question[:25],
        f"問。{question}",
        "日本で、いちばん高い山は、何か？",
        question[:24],
        short[:12],
        "関係のない文",
    ]
    assert [step.keeps(text) for text in found] == [False, False, False, True, True, True]
    assert step.why(found[1]) == "text of jnli 1"
    assert list(step.versions()) == [f"sha256 of {jnli / 'valid-v1.3.json'}"]
    with pytest.raises(UserError, match=r"expected jsts\*/valid-v\*\.json or .*put them there as they are published"):
        Decontaminate(tasks=("jsts",), data=tmp_path / "data").versions()
    with pytest.raises(UserError, match="expected the folder with the files of jglue"):
        Decontaminate(tasks=("jglue",)).versions()
    with pytest.raises(UserError, match="no such suite or task jgleu; did you mean"):
        Decontaminate(tasks=("jgleu",), data=tmp_path).versions()


def test_other_languages_are_compared_by_words(tmp_path: Path) -> None:
    sentence = "The keeper wrote in his diary every night that the old sea had taken another piece"
    (tmp_path / "set.txt").write_text(f"{sentence}\nToo short a line\n", encoding="utf-8")
    step = Decontaminate(files=(tmp_path / "set.txt",))
    words = sentence.split()
    texts = [f"It says: {'; '.join(words).upper()}!", " ".join(words[1:14]), " ".join(words[1:13]), "Too short a line"]
    assert [step.keeps(text) for text in texts] == [False, False, True, True]
    (tmp_path / "set.txt").write_text("短い", encoding="utf-8")
    with pytest.raises(UserError, match="expected a text of 13 letters or more"):
        Decontaminate(files=(tmp_path / "set.txt",), words=12).keeps("")
