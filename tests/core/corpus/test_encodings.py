"""Text that is not UTF-8 gives the documents that it would give as UTF-8, or is refused, told either way."""

from __future__ import annotations

import gzip
import io
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terakoya.corpus.corpus import Corpus, Document
from terakoya.corpus.encodings import find_codec, recognise
from terakoya.corpus.utf8_reader import Utf8Reader
from terakoya.errors import UserError
from terakoya.preparation.prepare import prepare
from terakoya_contract.toy import make_tokenizer

TEXTS = (
    "いつもお世話になっております。山田です。\n会議の資料をお送りします。ご確認ください。",
    "来週の水曜日に、東京の本社で打ち合わせをしたいと思います。",
    "ソフトウェアの能力を表示する。",  # in Shift_JIS, bytes of ソ, 能 and 表 are backslashes
    'Re: 「見積書」の件, "至急" お願いします。',
)
ENCODINGS = ("cp932", "euc_jp", "iso2022_jp", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32")


def content(format: str, texts: Sequence[str], newline: str = "\n") -> str:
    """The texts as a file of the format."""
    if format == "txt":
        return (newline * 2).join(text.replace("\n", newline) for text in texts) + newline
    if format == "jsonl":
        return "".join(json.dumps({"text": text}, ensure_ascii=False) + newline for text in texts)
    rows = ['"' + text.replace('"', '""') + '"' if format == "csv" else text.replace("\n", " ") for text in texts]
    return "".join(f"{number}\t{row}{newline}" if format == "tsv" else f"{number},{row}{newline}" for number, row in
                   [("id", "text"), *enumerate(rows)])  # fmt: skip


def read(corpus: Corpus, block_bytes: int = 1 << 20) -> list[tuple[str, int]]:
    """Text and line of each document, or reason of each reject; blocks are read in reverse, as processes may."""
    blocks = list(corpus.blocks(block_bytes=block_bytes))
    items = {(block.file, block.start): list(corpus.read(block)) for block in reversed(blocks)}
    return [
        (item.text if isinstance(item, Document) else item.reason, item.line)
        for block in blocks
        for item in items[block.file, block.start]
    ]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("format", ["txt", "jsonl", "csv", "tsv"])
def test_a_file_is_read_as_if_it_were_utf8(encoding: str, format: str, tmp_path: Path) -> None:
    text = content(format, [*TEXTS] * 3)
    (tmp_path / f"plain.{format}").write_text(text, encoding="utf-8", newline="")
    (tmp_path / f"other.{format}").write_text(text, encoding=encoding, newline="")
    (tmp_path / f"packed.{format}.gz").write_bytes(gzip.compress(text.encode(encoding)))
    expected = read(Corpus([tmp_path / f"plain.{format}"]))
    assert len(expected) == 12 and not any(reason == "bad encoding" for reason, _ in expected)
    for name in (f"other.{format}", f"packed.{format}.gz"):
        for block_bytes in (1, 100, 1 << 20):
            corpus = Corpus([tmp_path / name])
            assert read(corpus, block_bytes) == expected, (name, block_bytes)
            assert sum(block.disk_bytes for block in corpus.blocks(block_bytes=block_bytes)) == corpus.total_bytes


def test_a_remote_file_is_read_as_if_it_were_utf8(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    text = content("txt", TEXTS)
    fsspec.filesystem("memory").pipe("/encodings/a.txt", text.encode("cp932"))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert read(Corpus(["memory://encodings/a.txt"]), 50) == read(Corpus([tmp_path / "a.txt"]), 50)


@pytest.mark.parametrize("encoding", ["cp932", "iso2022_jp"])
def test_japanese_may_begin_after_any_amount_of_ascii(encoding: str, tmp_path: Path) -> None:
    text = "header: x\n\n" * 30_000 + content("txt", TEXTS)
    for name, codec in (("plain", "utf-8"), ("other", encoding)):
        (tmp_path / f"{name}.txt").write_text(text, encoding=codec, newline="")
    plain, other = (Corpus([tmp_path / f"{name}.txt"]) for name in ("plain", "other"))
    assert read(other, 100_000) == read(plain, 100_000)
    blocks = list(other.blocks(block_bytes=100_000))
    assert blocks[0].data is None and blocks[-1].data is not None  # ASCII is read by byte ranges, as UTF-8 is


def test_a_store_has_the_same_bytes(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer")
    text = content("txt", TEXTS, "\r\n")
    stores = []
    for encoding in ("utf-8", "cp932", "euc_jp", "utf-16-be"):
        (tmp_path / encoding).mkdir()
        (tmp_path / encoding / "a.txt").write_text(text, encoding=encoding, newline="")
        out = tmp_path / f"{encoding}.store"
        prepare([tmp_path / encoding], tokenizer=tmp_path / "tokenizer", out=out, processes=1)
        stores.append([(out / name).read_bytes() for name in ("tokens.bin", "tokens.idx", "documents.sizes")])
    assert stores[1:] == stores[:1] * 3


@pytest.mark.parametrize("format", ["txt", "jsonl", "csv", "tsv"])
@pytest.mark.parametrize("encoding", ["utf-8", "cp932", "utf-16"])
def test_carriage_returns_end_lines_where_nothing_else_does(format: str, encoding: str, tmp_path: Path) -> None:
    for name, newline in (("lf", "\n"), ("cr", "\r")):
        (tmp_path / f"{name}.{format}").write_text(content(format, TEXTS, newline), encoding=encoding, newline="")
    expected = read(Corpus([tmp_path / f"lf.{format}"]))
    assert read(Corpus([tmp_path / f"cr.{format}"]), 30) == expected and len(expected) == 4
    (tmp_path / "one.txt").write_bytes(b"50 %\r100 %\na\nb\n")  # control characters of a line stay
    assert read(Corpus([tmp_path / "one.txt"], documents="line"))[0] == ("50 %\r100 %", 1)


def test_what_windows_adds_to_japanese_encodings_is_read(tmp_path: Path) -> None:
    """①, ㈱ and 髙 are in row 13 and 92 of a table that Python's euc_jp and iso2022_jp lack."""
    pairs = {"①": b"\x2d\x21", "㈱": b"\x2d\x6a", "髙": b"\x7c\x62", "の": b"\x24\x4e"}
    jis = b"".join(pairs[character] for character in "①㈱髙の")
    lines = {"euc.txt": bytes(byte | 0x80 for byte in jis), "jis.txt": b"\x1b$B" + jis + b"\x1b(B"}
    for name, line in lines.items():
        start = content("txt", TEXTS).encode("euc_jp" if name == "euc.txt" else "iso2022_jp")
        (tmp_path / name).write_bytes(start + b"\n" + line + b"\n")
        assert read(Corpus([tmp_path / name]))[-1][0] == "①㈱髙の", name


def test_lines_in_several_encodings_are_read_line_by_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A mailbox of twenty years."""
    caplog.set_level(logging.INFO, logger="terakoya")
    lines = [text.replace("\n", "") for text in TEXTS] * 3
    encoded = [line.encode(codec) for line, codec in zip(lines, ("cp932", "utf-8", "iso2022_jp") * 4, strict=True)]
    (tmp_path / "box.txt").write_bytes(b"\n".join(encoded) + b"\n")
    assert [text for text, _ in read(Corpus([tmp_path / "box.txt"], documents="line"))] == lines
    told = [record.message for record in caplog.records if "is read as" in record.message]
    assert told == [f"{tmp_path / 'box.txt'}: is read as UTF-8, Shift_JIS (cp932)"]


@pytest.mark.parametrize("encoding", ["cp932", "euc_jp", "iso2022_jp", "utf-16-le"])
def test_a_damaged_line_is_rejected_alone(encoding: str, tmp_path: Path) -> None:
    lines = [text.replace("\n", "").encode(encoding) for text in TEXTS]
    bad = {"cp932": b"\x81\x20", "euc_jp": b"\xa4\x20", "iso2022_jp": b"\x1b$B\x7f\x7f", "utf-16-le": b"\x00\xd8"}
    lines[1] = bad[encoding] + lines[1]
    (tmp_path / "a.txt").write_bytes(("\n".encode(encoding)).join(lines) + "\n".encode(encoding))
    assert [text for text, _ in read(Corpus([tmp_path / "a.txt"], documents="line", encoding=encoding))] == [
        "bad encoding" if number == 1 else text.replace("\n", "") for number, text in enumerate(TEXTS)
    ]


@pytest.mark.parametrize("encoding", ["cp932", "euc_jp"])
def test_one_damaged_line_in_a_hundred_does_not_hide_the_encoding(encoding: str, tmp_path: Path) -> None:
    lines = [f"{number} 番目の文書です。".encode(encoding) for number in range(120)]
    lines[60] = lines[60][:-1]  # cut within a character
    (tmp_path / "a.txt").write_bytes(b"\n".join(lines) + b"\n\x1a")  # as DOS ends a text
    items = read(Corpus([tmp_path / "a.txt"], documents="line"))
    assert [line for text, line in items if text == "bad encoding"] == [61] and len(items) == 121
    assert items[119][0] == "119 番目の文書です。"


KOREAN = "안녕하세요. 회의 자료를 보내드립니다. 확인 부탁드립니다. 다음 주 수요일에 서울 본사에서 만나고 싶습니다.\n"
CHINESE = "您好，会议资料已经发送，请您确认。我们希望下周三在北京总部见面，讨论软件的性能和表示方法。\n"
RUSSIAN = "Здравствуйте, высылаем материалы совещания. Просим подтвердить получение и сообщить удобное время.\n"
FRENCH = "Déjà reçu : l'équipe a préparé le modèle français à Genève, où l'été était très agréable.\n"
QUOTES = "It’s a test and we don’t worry; they’re “here”.\n"
KATAKANA = "ﾔﾏﾀﾞ ﾀﾛｳ,ｽｽﾞｷ ｲﾁﾛｳ,ﾄｳｷｮｳﾄ ﾁﾖﾀﾞｸ\n"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (KOREAN, "euc_kr"), (CHINESE, "gb18030"), (CHINESE, "gb2312"), (RUSSIAN, "koi8-r"), (RUSSIAN, "cp1251"),
        (RUSSIAN, "cp866"), (FRENCH, "latin-1"), (FRENCH, "cp850"), (QUOTES, "cp1252"), (KATAKANA, "cp932"),
        (KATAKANA, "euc_jp"), ("東京都港区,大阪府堺市\n", "euc_jp"), ("會議資料已經發送，請您確認。\n", "big5"),
        ("鴦鴛鴣鴟のの会議は鴕鴒東京で\n", "cp932"),  # as bytes of something else look: many rare kanji
    ],
)  # fmt: skip
@pytest.mark.parametrize("times", [1, 20])
def test_what_is_not_sure_is_not_guessed(
    text: str, encoding: str, times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert recognise((text * times).encode(encoding), is_whole=True) is None
    file = tmp_path / "a.txt"
    file.write_bytes((text * times).encode(encoding))
    assert {item[0] for item in read(Corpus([file]))} == {"bad encoding"}
    assert f"{file}: is not UTF-8, and it is not sure what it is; name its encoding with --encoding" in caplog.text
    assert read(Corpus([file], documents="line", encoding=encoding)) == [(text.strip(), n + 1) for n in range(times)]


def test_a_table_whose_column_names_are_not_sure_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("본문,text\n한국어,문장\n", encoding="euc_kr")
    with pytest.raises(UserError, match=r"a\.csv: expected column names .* not UTF-8; name the encoding .*--encoding"):
        read(Corpus([tmp_path / "a.csv"]))
    assert read(Corpus([tmp_path / "a.csv"], encoding="euc_kr")) == [("문장", 2)]


def test_a_given_encoding_is_for_what_is_not_recognised(tmp_path: Path) -> None:
    """Bytes of EUC-JP are text in Shift_JIS, too: half-width katakana."""
    for name, codec in (("a.txt", "utf-8"), ("b.txt", "utf-16"), ("c.txt", "euc_jp")):
        (tmp_path / name).write_text(TEXTS[1], encoding=codec)
    (tmp_path / "d.txt").write_text(KATAKANA, encoding="cp932")
    corpus = Corpus([tmp_path], encoding="Shift_JIS")
    assert [text for text, _ in read(corpus)] == [*[TEXTS[1]] * 3, KATAKANA.strip()]
    assert corpus.facts["encoding"] == "cp932" and "encoding" not in Corpus([tmp_path]).facts
    recognised_none = read(Corpus([tmp_path], encoding="utf-8"))
    assert [text for text, _ in recognised_none] == [TEXTS[1], *["bad encoding"] * 3]


def test_names_of_encodings() -> None:
    names = ("Shift_JIS", "sjis", "SJIS", "cp932", "windows-31j", "ms932", "x-sjis")
    assert {find_codec(name) for name in names} == {"cp932"}
    assert find_codec("EUC-JP") == find_codec("eucjp") == find_codec("CP51932") == "euc_jp"
    assert find_codec("ISO-2022-JP") == find_codec("cp50221") == "iso2022_jp_ext"
    assert find_codec("UTF8") == find_codec("utf-8-sig") == "utf-8" and find_codec("GBK") == "gbk"
    for name in ("japanese", "base64", "cp037", ""):
        with pytest.raises(UserError, match="expected the name of an encoding"):
            find_codec(name)


class _Trickle(io.RawIOBase):
    """Bytes that come in pieces, as from a network."""

    def __init__(self, content: bytes, sizes: Sequence[int]) -> None:
        self._content, self._sizes = io.BytesIO(content), [*sizes]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._sizes.append(size := self._sizes.pop(0))
        return self._content.readinto(memoryview(buffer)[:size])


@given(
    st.lists(st.sampled_from([*TEXTS, "", "plain", "\r", "x" * 5000]), max_size=12),
    st.sampled_from(ENCODINGS),
    st.lists(st.integers(1, 999), min_size=1, max_size=5),
)
def test_the_result_does_not_depend_on_how_much_is_read_at_once(
    parts: list[str], encoding: str, sizes: list[int]
) -> None:
    content = "\n".join(parts).encode(encoding)
    whole = io.BufferedReader(Utf8Reader(io.BytesIO(content), "a")).read()
    reader = Utf8Reader(io.BufferedReader(_Trickle(content, sizes), 16), "a")
    pieces = iter(lambda: io.RawIOBase.read(reader, sizes[0]), b"")
    assert b"".join(pieces) == whole
    assert reader.tell() == len(whole)


def test_control_characters_are_no_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\0b\n\nc\x1b[1m\x1b(B\n")
    assert [text for text, _ in read(Corpus([tmp_path / "a.txt"]))] == ["a\0b", "c\x1b[1m\x1b(B"]
