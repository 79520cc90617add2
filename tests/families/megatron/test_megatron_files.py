"""Megatron's files become stores: every id type, sentences, repaired document ends; damage is refused at once."""

from __future__ import annotations

import struct
import tempfile
import time
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from word_tokenizer import make_folder

from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.store.token_store import StoreFacts, TokenStore
from terakoya.store.writer import write_store
from terakoya_checks.verify_store import verify
from terakoya_megatron.token_files import MegatronFiles
from terakoya_megatron.token_import import IdsOf, import_megatron

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
EOS = 5
VOCABULARY = Vocabulary(size=1000, pad=0, unk=1, eos=EOS, special=(0, 1, 2, 3, 4, EOS))
Documents = list[list[list[int]]]


def write_megatron(prefix: Path, documents: Documents, *, dtype: str = "uint16", end: int | None, drift: bool) -> None:
    """Writes documents of sentences in the published format; `end` follows each document that is not empty.

    With `drift` the lengths leave `end` out.
    """
    ids: list[int] = []
    lengths: list[int] = []
    index = [0]
    for sentences in documents:
        ids += chain(*sentences)
        lengths += map(len, sentences)
        if end is not None and sentences:
            ids.append(end)
            lengths[-1] += not drift
        index.append(len(lengths))
    size = np.dtype(dtype).itemsize
    pointers = [size * sum(lengths[:n]) for n in range(len(lengths))]
    Path(f"{prefix}.bin").write_bytes(np.array(ids, np.dtype(dtype).newbyteorder("<")).tobytes())
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(lengths), len(index))
    arrays = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *pointers)
    Path(f"{prefix}.idx").write_bytes(header + arrays + struct.pack(f"<{len(index)}q", *index))


def read(store: TokenStore) -> Documents:
    """Returns the documents of a store as sequences."""
    sequences = [store.tokens[a:b].tolist() for a, b in pairwise(store.offsets)]
    bounds = store.documents.tolist()
    return [sequences[a:b] for a, b in pairwise(bounds)]


def import_files(prefix: Path, out: Path, **options: Any) -> StoreFacts:
    tokenizer = out.with_name("tokenizer")
    if not tokenizer.exists():
        make_folder(tokenizer)
    vocabulary, starts_word = options.pop("vocabulary", VOCABULARY), options.pop("starts_word", None)
    return import_megatron(prefix, out, IdsOf(vocabulary, tokenizer, {"tokenizer": "x"}, starts_word), **options)


SENTENCES = [[[7, 8], [9]], [], [[100, 11, 12, 13]], [[14], [15, 16]]]
WHOLE = [[[7, 8, 9]], [[100, 11, 12, 13]], [[14, 15, 16]]]


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("drift", [False, True])
def test_sentences_of_every_type_become_lines(tmp_path: Path, dtype: str, drift: bool) -> None:
    write_megatron(tmp_path / "p", SENTENCES, dtype=dtype, end=EOS, drift=drift)
    facts = import_files(tmp_path / "p.idx", tmp_path / "store", repair=drift)
    store = TokenStore.open(tmp_path / "store")
    assert (facts.unit, facts.eos, facts.dtype, facts.word_starts) == ("line", EOS, "uint16", False)
    assert facts.options["repaired"] is drift
    assert read(store) == [[[7, 8], [9, EOS]], [[100, 11, 12, 13, EOS]], [[14], [15, 16, EOS]]]
    assert verify(store.folder) == []
    assert (store.tokenizer_folder / "size.txt").exists()
    import_files(tmp_path / "p", tmp_path / "whole", repair=drift, unit="document")
    assert read(TokenStore.open(tmp_path / "whole")) == [[[*document[0], EOS]] for document in WHOLE]


@settings(max_examples=30)
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(6, 99), min_size=1, max_size=5), max_size=3), min_size=1, max_size=9
    ).filter(any),
    end=st.sampled_from([EOS, None]),
    drift=st.booleans(),
    chunk=st.integers(1, 4),
)
def test_import_in_chunks_of_any_size_gives_the_written_documents(
    documents: Documents, end: int | None, drift: bool, chunk: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("terakoya_megatron.token_files._DOCUMENTS", chunk)
        patch.setattr("terakoya_megatron.token_files._SEQUENCES", chunk)
        patch.setattr("terakoya_megatron.token_import.CHUNK", chunk)
        write_megatron(Path(folder) / "p", documents, end=end, drift=drift)
        out = Path(folder) / "store"
        facts = import_files(Path(folder) / "p", out, repair=True, starts_word=np.arange(1000) % 2 == 0)
        expected = [[list(line) for line in document] for document in documents if document]
        for document in expected:
            document[-1] += [end] * (end is not None)
        store = TokenStore.open(out)
        assert read(store) == expected and facts.eos == end
        assert store.word_starts(0, facts.tokens).tolist() == (store.tokens % 2 == 0).tolist()
        assert verify(out) == []


def test_our_files_and_megatrons_files_are_equal(tmp_path: Path) -> None:
    documents = [[[7, 8], [9]], [[100, 11, 12, 13]]]
    for unit in ("document", "line"):
        ours = write_store(tmp_path / unit, documents, vocabulary=VOCABULARY, unit=unit, eos=EOS)  # type: ignore[arg-type]
        lines = documents if unit == "line" else [[list(chain(*document))] for document in documents]
        write_megatron(tmp_path / "p", lines, end=EOS, drift=False)
        import_files(ours.folder / "tokens", tmp_path / f"{unit} again")
        for suffix in ("bin", "idx"):
            expected = (tmp_path / f"p.{suffix}").read_bytes()
            assert (ours.folder / f"tokens.{suffix}").read_bytes() == expected
            assert (tmp_path / f"{unit} again" / f"tokens.{suffix}").read_bytes() == expected
        assert TokenStore.open(tmp_path / f"{unit} again").fingerprint == ours.fingerprint


def test_omitted_document_ends_are_refused_and_other_surplus_is_damage(tmp_path: Path) -> None:
    write_megatron(tmp_path / "p", SENTENCES, end=EOS, drift=True)
    with pytest.raises(UserError, match=r"leaves out the end-of-document id 5 of each of 3 documents.*--repair"):
        import_files(tmp_path / "p", tmp_path / "store")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["p.bin", "p.idx", "tokenizer"]
    raw = (tmp_path / "p.bin").read_bytes()
    (tmp_path / "p.bin").write_bytes(raw[:-2] + b"\x63\0")  # the last end of document
    with pytest.raises(UserError, match="only 2 documents would then end with id 5"):
        import_files(tmp_path / "p", tmp_path / "store", repair=True)
    (tmp_path / "p.bin").write_bytes(raw + b"\0\0")
    with pytest.raises(UserError, match=r"p\.bin: expected 20 bytes for 10 ids.*got 28: not the file of this index"):
        import_files(tmp_path / "p", tmp_path / "store", repair=True)


def test_the_end_of_documents_is_found_or_must_be_given(tmp_path: Path) -> None:
    write_megatron(tmp_path / "none", WHOLE, end=None, drift=False)
    assert import_files(tmp_path / "none", tmp_path / "a").eos is None
    write_megatron(tmp_path / "other", WHOLE, end=3, drift=False)
    assert import_files(tmp_path / "other", tmp_path / "b").eos == 3
    assert import_files(tmp_path / "other", tmp_path / "c", eos=None).eos is None
    write_megatron(tmp_path / "unknown", WHOLE, end=1, drift=False)
    assert import_files(tmp_path / "unknown", tmp_path / "unknown words").eos is None
    gpt2 = Vocabulary(size=1000, unk=EOS, bos=EOS, eos=EOS, special=(EOS,))  # its unknown token ends documents
    write_megatron(tmp_path / "gpt2", WHOLE, end=EOS, drift=False)
    assert import_files(tmp_path / "gpt2", tmp_path / "e", vocabulary=gpt2).eos == EOS
    some = [[[7, EOS]], [[8]]]
    write_megatron(tmp_path / "some", some, end=None, drift=False)
    with pytest.raises(UserError, match=r"every document to end with id 5, or none, got 1 of 2; give --eos"):
        import_files(tmp_path / "some", tmp_path / "d")
    with pytest.raises(UserError, match=r"every document to end with id 8"):
        import_files(tmp_path / "some", tmp_path / "d", eos=8)
    assert import_files(tmp_path / "some", tmp_path / "d", eos=None).eos is None


def test_unit_line_is_refused_for_whole_documents(tmp_path: Path) -> None:
    write_megatron(tmp_path / "p", WHOLE, end=None, drift=False)
    with pytest.raises(UserError, match="--unit line: expected documents split into sentences"):
        import_files(tmp_path / "p", tmp_path / "store", unit="line")


def damage(prefix: Path, how: str) -> None:
    idx, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    raw = bytearray(idx.read_bytes())
    match how:
        case "no idx":
            idx.unlink()
        case "no bin":
            tokens.unlink()
        case "short bin":
            tokens.write_bytes(tokens.read_bytes()[:-1])
        case "short idx":
            idx.write_bytes(raw[:-1])
        case "floats":
            raw[17] = 7
        case "other type":
            raw[17] = 4
        case "lengths":
            raw[34] += 1
        case "documents":
            raw[-16] = 77
        case "old format":
            raw[:9] = b"TNTIDX\0\0\0"
    if how not in ("no idx", "short idx"):
        idx.write_bytes(raw)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no idx", r"p\.idx: no such file"),
        ("no bin", r"p\.bin: no such file"),
        ("short bin", r"p\.bin: expected [\d,]+ bytes for [\d,]+ ids of type uint16.*truncated"),
        ("short idx", r"p\.idx: expected [\d,]+ bytes.*truncated or damaged; make the files again"),
        ("floats", r"p\.idx: expected ids of an integer type, got float32"),
        ("other type", r"p\.idx: lengths and byte positions disagree"),
        ("lengths", r"p\.idx: lengths and byte positions disagree in sequences 0 to"),
        ("documents", r"p\.idx: expected document entries that rise from 0"),
        ("old format", r"p\.idx: expected a Megatron index"),
    ],
)
def test_damage_is_reported_at_once(tmp_path: Path, how: str, message: str) -> None:
    write_megatron(tmp_path / "p", WHOLE * 1000, end=EOS, drift=False)
    damage(tmp_path / "p", how)
    start = time.perf_counter()
    with pytest.raises(UserError, match=message):
        import_files(tmp_path / "p", tmp_path / "store")
    assert time.perf_counter() - start < 1


def test_ids_of_another_vocabulary_are_refused_at_any_position(tmp_path: Path) -> None:
    document = [[7] * 500_000]
    write_megatron(tmp_path / "p", [document], end=EOS, drift=False)
    with pytest.raises(UserError, match=r"p\.bin: token 0: expected an id below 6.*got 7; name the tokenizer"):
        import_files(tmp_path / "p", tmp_path / "store", vocabulary=Vocabulary(size=6, eos=EOS))
    document[0][123_456] = 999
    write_megatron(tmp_path / "p", [document], dtype="int64", end=EOS, drift=False)
    with pytest.raises(UserError, match=r"p\.bin: token 123,456: expected an id below 999"):
        import_files(tmp_path / "p", tmp_path / "store", vocabulary=Vocabulary(size=999, eos=EOS))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["p.bin", "p.idx", "tokenizer"]


def test_opening_files_reads_no_tokens(tmp_path: Path) -> None:
    write_megatron(tmp_path / "p", SENTENCES, end=EOS, drift=True)
    files = MegatronFiles.open(tmp_path / "p.bin")
    assert files.omits_document_ends and files.has_sentences and files.empty == (0, 1)
    assert [ids.tolist() for ids in files.last_ids(most=2)] == [[EOS, EOS]]
