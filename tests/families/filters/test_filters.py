"""Each rule of the cleaning steps of the family filters drops its text and names itself, and none drops plain prose."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from terakoya.errors import UserError
from terakoya_filters import register_cleaning_steps
from terakoya_filters.markup import strip_markup
from terakoya_filters.repetition import _duplicate_characters, _top_characters
from terakoya_filters.words import find_words

PROSE = (
    "朝の市場は六時に始まる。魚を積んだ軽トラックが次々に着き、仲買人が氷の上の鯛や鯖を手早く見て回る。\n"
    "私は隅の食堂で味噌汁をすすりながら、その声の行き来を聞くのが好きだった。"
)
MENU = "ホーム 会社概要 製品情報 採用情報 お知らせ お問い合わせ 利用規約 お客様の声 店舗検索 特集 戻る"
LONG = "".join(chr(0x4E00 + 37 * number % 5000) + "のは"[number % 2] for number in range(400)) + "。"


def why(step: str, text: str, **settings: object) -> str:
    """The rule that drops a text; "" where it stays."""
    made = register_cleaning_steps()[step].model_validate(settings)
    changed = made.change(text)
    return "" if made.keeps(changed) else made.why(changed)


@pytest.mark.parametrize("step", ["language", "repetition", "boilerplate", "lines", "kana", "markup"])
def test_prose_stays_as_it_is(step: str) -> None:
    made = register_cleaning_steps()[step]()
    assert made.change(PROSE) == PROSE and made.keeps(PROSE) and made.keeps(made.change(LONG))
    assert isinstance(made.keeps(""), bool) and made.change("") == ""


@pytest.mark.parametrize(
    ("step", "text", "rule"),
    [
        ("language", "今天天气很好,我们一起去公园。", "zh"),
        ("language", "오늘은 날씨가 맑다.", "ko"),
        ("language", "The bridge was closed.", "another"),
        ("language", "12345 !!", "no language"),
        ("repetition", "同じ行である。\n" * 5, "duplicate lines"),
        ("repetition", PROSE + "\n" + "同じ長い行がもう一度出てくる文である。\n" * 4 + LONG[:60], "duplicate lines"),
        ("repetition", "段落。\n\n" * 4, "duplicate paragraphs"),
        ("repetition", "私は猫です。私は犬です。私は鳥です。" * 3, "top 2-gram"),
        ("repetition", (PROSE.replace("\n", "") + LONG[:100]) * 2, "duplicate 5-grams"),
        ("repetition", "たのしいなうれしいなすてきだなあ" * 9, "duplicate characters"),
        ("boilerplate", "ホーム\n会社概要\n採用情報", "few sentences"),
        ("boilerplate", "int a;\nint b;\nreturn a;\n終わり。", "code"),
        ("boilerplate", "Lorem ipsum dolor sit amet.", "lorem ipsum"),
        ("lines", "短い文である。", "short"),
        ("lines", "。" * 60, "no words"),
        ("lines", PROSE + "a" * 1001, "long word"),
        ("lines", "\n".join("・" + line for line in (PROSE, PROSE, PROSE)).replace("\n私", "私"), "bullets"),
        ("lines", "\n".join(line + "…" for line in PROSE.split("\n")), "ellipses"),
        ("lines", PROSE + "#" * 9, "many #"),
        ("lines", "10 20 30 40 50 60 70 80 90 100 " * 3, "few letters"),
        (
            "lines",
            MENU.replace(" ", "\n"),
            "many lines",
        ),
        ("kana", "東京都 不動産 賃貸 一戸建 中古物件 新築分譲 土地売買", "little hiragana"),
        ("kana", "アメリカンリーグとナショナルリーグのワールドシリーズ", "much katakana"),
    ],
)
def test_a_rule_drops_its_text_and_names_itself(step: str, text: str, rule: str) -> None:
    assert why(step, text).startswith(rule)


@pytest.mark.parametrize(
    ("step", "settings", "text"),
    [
        ("language", {"languages": ["ja", "zh"]}, "今天天气很好,我们一起去公园。"),
        ("language", {"min_share": 0.0}, "The word 東京 has この one, and many more words stand around it here."),
        ("repetition", {"max_duplicate_lines": 1, "max_top_ngram": ()}, PROSE + LONG[:40] + "\nはい。" * 5),
        ("boilerplate", {"min_sentences": 0}, "風が吹くたびに\n草は一度だけうなずいて"),
        ("lines", {"min_characters": 5}, "短い文である。"),
        ("kana", {"min_hiragana": 0, "max_kanji": 1}, "東京都 不動産 賃貸 一戸建 中古物件 新築分譲 土地売買"),
    ],
)
def test_a_threshold_is_a_setting(step: str, settings: dict, text: str) -> None:
    assert why(step, text) and not why(step, text, **settings)


def test_the_optional_rules_are_those_of_c4() -> None:
    step = register_cleaning_steps()["boilerplate"](only_sentences=True, min_line_words=3)
    assert step.change("Menu\nA whole line of words.\nOne.\nIt trails off...") == "A whole line of words."
    assert why("boilerplate", "A set {1, 2} is here.", keep_curly_brackets=False) == "curly bracket"


def test_lines_around_a_text_are_removed_and_lines_about_them_stay() -> None:
    step = register_cleaning_steps()["boilerplate"](phrases=["広告枠"])
    stays = "JavaScriptは1995年に生まれた。[1]"
    text = f"当サイトではクッキーを使用しています。\n{stays}\nAll Rights Reserved.\nこの広告枠について"
    assert step.change(text) == stays.removesuffix("[1]")
    assert step.change("値は a[0] である。") == "値は a[0] である。"


@pytest.mark.parametrize(
    ("text", "stripped"),
    [
        ('<p class="a">一行目<br>二行目</p><!-- x -->', "一行目\n二行目"),
        ("<script>var a = 1 < 2;</script>本文。&lt;重要&gt;&nbsp;A&amp;B", "本文。<重要> A&B"),
        ("'''例'''は[[日本|日本国]]の[[会社]]。{{出典|date=1}}", "例は日本国の会社。"),
        ("[b]太字[/b]と[url=http://a]リンク[/url]", "太字とリンク"),
    ],
)
def test_markup_is_taken_out(text: str, stripped: str) -> None:
    assert strip_markup(text) == stripped


@pytest.mark.parametrize(
    "text",
    [
        "<head> の先頭に <script> タグを追加する。",
        "vector<int> と a < b && c > d を使う。",
        "[[deprecated]] は属性である。",
        "`<b>x</b>` と書く。\n```\n<p>x</p>\n```",
        "<script setup> の使用と {{ version }}",
    ],
)
def test_a_text_about_markup_stays(text: str) -> None:
    assert strip_markup(text) == text


def test_words_are_runs_of_a_script_and_words_between_spaces() -> None:
    def words(text: str) -> list[str]:
        found = find_words(text)
        return [text[start:end] for start, end in zip(found.starts, found.ends, strict=True)]

    assert words("吾輩は猫である、don't know𠮟る。") == ["吾輩", "は", "猫", "である", "don't", "know", "𠮟", "る"]
    english = "It's a text, with\tspaces\xa0and (marks)."
    assert words(english) == english.split()
    same, other = find_words("今日は今日は昨日"), find_words("は")
    assert same.hashes[0] == same.hashes[2] != same.hashes[4] and same.hashes[1] == other.hashes[0]


def test_languages_of_other_scripts_need_a_model() -> None:
    pytest.importorskip("py3langid")
    french = "Le vieux pont est fermé depuis l'hiver dernier, et la ville est très calme."
    english = "The old bridge was closed last winter, and the town has been quiet since."
    assert not why("language", english, languages=["en"])
    assert why("language", french, languages=["en"]) == "fr"
    assert not why("language", PROSE, languages=["en", "ja"])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise __import__("importlib.metadata").metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    steps = register_cleaning_steps()
    with pytest.raises(UserError, match=r'pip install "terakoya\[filters\]"'):
        steps["language"](languages=("en",)).versions()
    for name in ("datatrove", "hojichar"):
        with pytest.raises(UserError, match=f"pip install {name}"):
            steps[name](filter="Any").versions()


def _lines(words: Sequence[str], width: int) -> str:
    return "\n".join(" ".join(words[at : at + width]) for at in range(0, len(words), width))


ALPHABET = [chr(97 + number) * (2 + number % 5) + chr(97 + number // 2) for number in range(26)]
ENGLISH = {
    "varied": _lines([ALPHABET[number * number % 23] + str(number % 61) for number in range(200)], 9),
    "lines": _lines(ALPHABET, 9) + "\n" + "the same line again here\n" * 6 + "end",
    "line characters": _lines([word + str(n) for n in range(9) for word in ALPHABET[:12]], 4)
    + ("\n" + " ".join(ALPHABET) + " " + " ".join(ALPHABET[:20])) * 4,
    "paragraphs": "\n\n".join([_lines(ALPHABET[:9], 3), _lines(ALPHABET[9:15], 3)] + ["of the same"] * 3),
    "top 2": " ".join(f"very good {word}" for word in ALPHABET),
    "top 3": " ".join(f"a b c {word} {word}{word[0]} x{word}" for word in ALPHABET),
    "five": " ".join(ALPHABET[:9] + [f"n{n}" for n in range(40)] + ALPHABET[:9] + [f"m{n}" for n in range(12)]),
    "ten": " ".join(ALPHABET[:11] + [f"n{n:04d}" for n in range(65)] + ALPHABET[:11]),
    "periodic": " ".join(ALPHABET[:7] * 9),
}
ANSWERS = json.loads((Path(__file__).parent / "datatrove.json").read_text(encoding="utf-8"))
"""What datatrove 0.10.1 says of these texts, whose words are those between spaces."""

OURS = {"dup_line_frac": "duplicate lines", "dup_line_char_frac": "duplicate line characters"}
OURS |= {"dup_para_frac": "duplicate paragraphs", "dup_para_char_frac": "duplicate paragraph characters"}
OURS |= {f"top_{size}_gram": f"top {size}-gram" for size in (2, 3, 4)}
OURS |= {f"duplicated_{size}_n_grams": f"duplicate {size}-grams" for size in range(5, 11)}


@pytest.mark.parametrize("name", ENGLISH)
def test_gophers_rules_are_those_of_datatrove(name: str) -> None:
    answer = ANSWERS[name]
    assert why("repetition", ENGLISH[name], max_duplicate_characters=1) == (OURS[answer] if answer else "")


def count_ngrams(words: Sequence[str], size: int) -> tuple[int, int]:
    """The characters, with spaces, of the first most frequent n-gram in all its places if it comes three times, and of
    the words, without spaces, of n-grams that come again, where each begins behind the last one of these."""
    found = [tuple(words[at : at + size]) for at in range(len(words) - size + 1)]
    gram, times = (Counter(found).most_common(1) or [((), 0)])[0]
    begins: list[int] = []
    again: list[int] = []
    for at, each in enumerate(found):
        if not again or at >= again[-1] + size:
            (again if any(found[before] == each for before in begins) else begins).append(at)
    return times * len(" ".join(gram)) if times >= 3 else 0, sum(len("".join(found[at])) for at in again)


@pytest.mark.parametrize("seed", range(30))
def test_characters_in_ngrams_are_those_counted_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    vocabulary = ["".join(chance.choices("abc", k=chance.randint(1, 7))) for _ in range(2 + seed % 5)]
    words = chance.choices(vocabulary, k=chance.randint(0, 60))
    found = find_words(" ".join(words))
    for size in range(2, 11):
        for count, right in zip((_top_characters, _duplicate_characters), count_ngrams(words, size), strict=True):
            for limit in (0, right / 2, abs(right - 0.5), right):
                counted = count(found, size, limit)
                assert counted == right if right > limit else counted <= limit, (size, limit, words)


def test_the_recorded_answers_are_those_of_datatrove(monkeypatch: pytest.MonkeyPatch) -> None:
    filters = pytest.importorskip("datatrove.pipeline.filters.gopher_repetition_filter")
    document = pytest.importorskip("datatrove.data").Document
    monkeypatch.setattr(filters, "split_into_words", lambda text, language: text.split())
    judge = filters.GopherRepetitionFilter()
    answers = {name: judge.filter(document(text=text, id=name)) for name, text in ENGLISH.items()}
    assert {name: "" if answer is True else answer[1] for name, answer in answers.items()} == ANSWERS


@pytest.mark.parametrize(("only_sentences", "left"), [(True, 2), (False, 3)])
def test_lines_are_those_that_datatroves_c4_filter_leaves(only_sentences: bool, left: int) -> None:
    pytest.importorskip("datatrove")
    text = "Home\nA whole line of words.\nPlease enable JavaScript to go on.\nNo mark at its end\nTwo words.\nIs it so?"
    options = {"min_num_sentences": -1, "filter_no_terminal_punct": only_sentences, "min_words_per_line": 3}
    theirs = register_cleaning_steps()["datatrove"](filter="C4QualityFilter", settings=options)
    ours = register_cleaning_steps()["boilerplate"](only_sentences=only_sentences, min_line_words=3)
    assert ours.change(text) == theirs.change(text)
    assert len(ours.change(text).split("\n")) == left


def test_datatroves_filters_go_by_name() -> None:
    pytest.importorskip("datatrove")
    step = register_cleaning_steps()["datatrove"](filter="C4QualityFilter", settings={"min_num_sentences": -1})
    assert not step.keeps("A {bracket} is here.") and step.why("A {bracket} is here.") == "curly_bracket"
    assert step.versions()["datatrove"] and step.reason == "C4QualityFilter"
    with pytest.raises(UserError, match='did you mean "C4QualityFilter"'):
        register_cleaning_steps()["datatrove"](filter="C4QualtyFilter").versions()
    with pytest.raises(UserError, match='unknown "min_sentences"'):
        register_cleaning_steps()["datatrove"](filter="C4QualityFilter", settings={"min_sentences": 1}).versions()


def test_hojichars_filters_go_by_name() -> None:
    pytest.importorskip("hojichar")
    steps = register_cleaning_steps()
    assert not steps["hojichar"](filter="DiscardBBSComments").keeps("BBS Com 投稿日: レス " * 20)
    assert steps["hojichar"](filter="DocumentNormalizer").change("ＡＢＣ") == "ABC"
    assert steps["hojichar"](filter="DocumentLengthFilter", settings={"min_doc_len": 3}).versions()["hojichar"]
