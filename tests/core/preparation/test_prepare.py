"""Preparing gives the same bytes with any number of processes and after any kill, and reports rejects."""

from __future__ import annotations

import gzip
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import psutil
import pytest
from selection import at_night
from small_preparation import contents, prepare_corpus
from small_store import damage
from word_tokenizer import WordEncoder, WordTokenizer, line_ids, make_folder

from terakoya.components import EncodedDocuments
from terakoya.corpus import utf8_reader
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.preparation import disk_space
from terakoya.store.assembly import assemble_store
from terakoya.store.token_store import TokenStore, read_facts
from terakoya_checks.verify_store import verify

VOCABULARY = 1000


def random_texts(seed: int, count: int) -> list[str]:
    """Returns documents of a few lines, some without a token."""
    rng = random.Random(seed)
    words = ["東京", "寺子屋", "abcdefgh", "[MASK]", "~", "き", "読み書き", "そろばん稽古"]
    return [
        "~ ~\n~"
        if number % 20 == 7
        else "\n".join(" ".join(rng.choices(words, k=rng.randrange(1, 9))) for _ in range(rng.randrange(1, 6)))
        for number in range(count)
    ]


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "tokenizer", size=VOCABULARY)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Two files, one of them compressed, in about 25 blocks, with one bad line."""
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in random_texts(1, 300)]
    rows.insert(200, '{"no text": 1}')
    (tmp_path / "a.jsonl").write_text("\n".join(rows[:150]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(rows[150:]).encode()))
    return Corpus([tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"], block_bytes=1500)


SCRIPT = """
import logging, os, signal, sys
from pathlib import Path
from word_tokenizer import WordTokenizer
from terakoya.corpus.corpus import Corpus
from small_preparation import prepare_corpus

def run(folder, out, processes, block_bytes=1500):
    corpus = Corpus([folder / "a.jsonl", folder / "b.jsonl.gz"], block_bytes=block_bytes)
    prepare_corpus(corpus, WordTokenizer(), folder / "tokenizer", out, processes=processes, max_rejects=1.0)
"""


def start(code: str, *arguments: object, delay: float = 0.0, worker_delay: float = 0.0) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2] / "helpers"), os.environ.get("PYTHONPATH", "")]),
        "WORD_TOKENIZER_DELAY": str(delay),
        "WORD_TOKENIZER_WORKER_DELAY": str(worker_delay),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", SCRIPT + code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


RUN = """
if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
"""


@pytest.mark.parametrize("unit", ["document", "line"])
@pytest.mark.parametrize("append_eos", [False, True])
def test_the_store_holds_every_line_of_every_document(
    corpus: Corpus, tokenizer_folder: Path, tmp_path: Path, unit: str, append_eos: bool
) -> None:
    out = tmp_path / "store"
    facts = prepare_corpus(
        corpus,
        WordTokenizer(),
        tokenizer_folder,
        out,
        unit=unit,
        append_eos=append_eos,
        max_rejects=1.0,  # type: ignore[arg-type]
    )
    store = TokenStore.open(out)
    expected: list[list[int]] = []
    words: list[bool] = []
    firsts, empty = [0], 0
    for text in random_texts(1, 300):
        lines = [line_ids(line, VOCABULARY) for line in text.split("\n")]
        kept = [list(ids) for ids, _ in lines if ids]
        if not kept:
            empty += 1
            continue
        words += [start for _, starts in lines for start in starts] + [True] * append_eos
        kept[-1] += [5] * append_eos
        expected += kept if unit == "line" else [list(chain(*kept))]
        firsts.append(len(expected))
    sequences = [store.tokens[a:b].tolist() for a, b in pairwise(store.offsets)]
    assert sequences == expected
    assert store.documents.tolist() == firsts
    assert store.word_starts(0, facts.tokens).tolist() == words
    assert facts.eos == (5 if append_eos else None)
    assert empty > 0 and facts.rejected_by_reason == {"missing field": 1, "no tokens": empty}
    assert facts.literals == {"[MASK]": sum(text.split().count("[MASK]") for text in random_texts(1, 300))}
    assert verify(out) == []
    assert not (out / ".parts").exists() and not (out / ".lock").exists()
    assert [f.name for f in (out / "tokenizer").iterdir()] == ["size.txt"]


def test_bytes_do_not_depend_on_processes_or_blocks(corpus: Corpus, tokenizer_folder: Path, tmp_path: Path) -> None:
    stores = []
    for processes in (1, 2, 3):
        out = tmp_path / f"store{processes}"
        prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, processes=processes, max_rejects=1.0)
        stores.append(contents(out))
    assert stores[0] == stores[1] == stores[2]
    whole = Corpus(corpus.sources)
    facts = prepare_corpus(whole, WordTokenizer(), tokenizer_folder, tmp_path / "whole", max_rejects=1.0)
    assert facts.files == read_facts(tmp_path / "store1").files
    assert contents(tmp_path / "whole")["rejects.jsonl"] == stores[0]["rejects.jsonl"]


@pytest.mark.parametrize("stride", at_night([1, 9], always=[9]))
def test_killed_at_any_file_operation_and_restarted_gives_the_same_bytes(
    stride: int, corpus: Corpus, tokenizer_folder: Path, tmp_path: Path
) -> None:
    large_blocks = Corpus(corpus.sources, block_bytes=15_000)
    prepare_corpus(large_blocks, WordTokenizer(), tokenizer_folder, tmp_path / "whole", max_rejects=1.0)
    # For every k (every ninth one by day), a child dies at its k-th flush to disk, and another child continues.
    code = """
from terakoya.plugins import load
load()  # once, not in each child
logging.getLogger("terakoya").setLevel(logging.ERROR)
count = 0
fsync = os.fsync
def dying(descriptor):
    global count
    count += 1
    if count == limit:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
os.fsync = dying
folder, stride = Path(sys.argv[1]), int(sys.argv[2])
limit, finished = 1 - stride, 0
while not finished:
    limit += stride
    child = os.fork()
    if not child:
        run(folder, folder / "killed" / str(limit), 1, 15_000)
        os._exit(0)
    finished = os.WIFEXITED(os.waitpid(child, 0)[1])
Path(folder / "killed" / "rounds").write_text(str(limit))
os.fsync = fsync
for number in range(1, limit, stride):
    run(folder, folder / "killed" / str(number), 1, 15_000)
"""
    (tmp_path / "killed").mkdir()
    process = start(code, tmp_path, stride)
    assert process.communicate()[1] == "" and process.returncode == 0
    rounds = int((tmp_path / "killed" / "rounds").read_text())
    assert rounds > 25  # four flushes per part, then those of the join
    expected = contents(tmp_path / "whole")
    for limit in range(1, rounds, stride):
        assert contents(tmp_path / "killed" / str(limit)) == expected, limit


@pytest.mark.parametrize("processes", at_night([1, 2, 3], always=[2]))
def test_killed_in_the_middle_and_restarted_keeps_finished_parts(
    corpus: Corpus, tokenizer_folder: Path, tmp_path: Path, processes: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, whole, max_rejects=1.0)
    process = start(RUN, tmp_path, out, processes, delay=0.15)
    parts = out / ".parts"
    deadline = time.monotonic() + 60
    while len(list(parts.glob("0*.json"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= (processes if processes > 1 else 0)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, "workers outlived their parent"
    assert not (out / "store.json").exists()
    with pytest.raises(UserError, match="run the same command again"):
        TokenStore.open(out)
    caplog.set_level(logging.INFO, logger="terakoya")
    prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, processes=processes, max_rejects=1.0)
    assert contents(out) == contents(whole)
    assert "parts were there already" in caplog.text


@pytest.mark.parametrize("number", at_night([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], always=[signal.SIGINT]))
def test_workers_end_with_their_parent_at_once(
    corpus: Corpus, tokenizer_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = start(RUN, tmp_path, tmp_path / "out", 2, worker_delay=600.0)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out" / ".parts" / "inputs.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    children: list[psutil.Process] = []
    while len(children) < 2 and time.monotonic() < deadline:
        children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.02)
    assert len(children) >= 2
    time.sleep(2.5)  # for the workers to be in the middle of a block
    children = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    process.send_signal(number)
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert time.monotonic() - began < 180, "not the 600 seconds that a worker still had to go"
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in errors and "finished parts are kept" in errors


def test_a_dead_worker_is_explained(tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "terakoya.preparation.disk_space._samples", lambda text, _: [text[:100]]
    )  # not the document that kills the worker
    file = tmp_path / "a.txt"
    file.write_text("\n\n".join(["good text"] * 400 + ["die!"] + ["good text"] * 10))
    corpus = Corpus([file], block_bytes=1000)
    with pytest.raises(UserError, match="killed because memory ran out; use fewer than --processes 2"):
        prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, tmp_path / "out", processes=2)


def test_a_finished_store_stays_and_another_input_is_refused(
    corpus: Corpus, tokenizer_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    facts = prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=1.0)
    written = (out / "tokens.bin").stat().st_mtime_ns
    caplog.set_level(logging.INFO, logger="terakoya")
    assert prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=1.0) == facts
    assert "nothing to do" in caplog.text and (out / "tokens.bin").stat().st_mtime_ns == written
    with pytest.raises(UserError, match=r"changed: options .unit: was 'document', is now 'line'"):
        prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, unit="line", max_rejects=1.0)
    (tokenizer_folder / "size.txt").write_text("999")
    with pytest.raises(UserError, match="changed: tokenizer vocabulary"):
        prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=1.0)
    (tokenizer_folder / "size.txt").write_text(str(VOCABULARY))
    (tmp_path / "a.jsonl").write_text('{"text": "new text"}')
    fresh = Corpus(corpus.sources, block_bytes=1500)
    with pytest.raises(UserError, match="finished store made from other input; changed: corpus"):
        prepare_corpus(fresh, WordTokenizer(), tokenizer_folder, out, max_rejects=1.0)
    assert TokenStore.open(out).facts == facts
    changed = prepare_corpus(fresh, WordTokenizer(), tokenizer_folder, out, max_rejects=1.0, force=True)
    assert changed.documents < facts.documents and verify(out) == []


def test_force_removes_stores_alone_and_not_the_tokenizer_that_is_given(
    corpus: Corpus, tokenizer_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mine"
    (out / "plans").mkdir(parents=True)
    given = make_folder(out / "tokenizer", size=VOCABULARY)
    with pytest.raises(UserError, match="expected a new or empty folder, got one that holds plans, tokenizer"):
        prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, force=True)
    with pytest.raises(UserError, match=r"mine/tokenizer: is in .*mine, whose store --force removes"):
        prepare_corpus(corpus, WordTokenizer(), given, out, force=True)
    assert (given / "size.txt").exists() and (out / "plans").exists()
    (out / "tokens.bin").touch()  # as an interrupted removal leaves it
    prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=1.0, force=True)
    assert verify(out) == [] and not (out / "plans").exists()


def test_unfinished_parts_of_another_input_are_not_used(corpus: Corpus, tokenizer_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="--max-rejects 0"):
        prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=0)
    with pytest.raises(UserError, match="unfinished store made from other input; changed: options"):
        prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, append_eos=True, max_rejects=1.0)
    prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, append_eos=True, max_rejects=1.0, force=True)
    prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, tmp_path / "fresh", append_eos=True, max_rejects=1.0)
    assert contents(out) == contents(tmp_path / "fresh")


def test_a_damaged_part_is_made_again(
    corpus: Corpus, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError):
        prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=0)
    parts = out / ".parts"
    (parts / "000001.json").write_bytes((parts / "000001.json").read_bytes()[:40])
    damage(parts / "000002.part")
    damage(parts / "000002.json")
    (parts / "000003.part").write_bytes((parts / "000003.part").read_bytes()[:-1])
    damage(parts / "000004.part")
    intact = {file: file.stat().st_mtime_ns for file in parts.glob("0*") if int(file.stem) not in (1, 2, 3, 4)}
    with monkeypatch.context() as patch:
        patch.setattr("terakoya.preparation.job.assemble_store", lambda *_, **__: pytest.skip("not reached"))
        with pytest.raises(pytest.skip.Exception):
            prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=1.0)
    assert len(intact) > 6 and intact == {file: file.stat().st_mtime_ns for file in intact}
    prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=1.0)
    prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, tmp_path / "fresh", max_rejects=1.0)
    assert contents(out) == contents(tmp_path / "fresh")


def test_a_part_that_is_damaged_before_the_join_ends_the_run(
    corpus: Corpus, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage_and_assemble(folder: Path, *arguments: object, **options: object) -> object:
        damage(folder / ".parts" / "000003.part")
        return assemble_store(folder, *arguments, **options)  # type: ignore[arg-type]

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("terakoya.preparation.job.assemble_store", damage_and_assemble)
        with pytest.raises(
            UserError, match=r"000003\.part: content changed since it was written; run the same command"
        ):
            prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=1.0)
    inputs = (out / ".parts" / "inputs.json").read_bytes()
    (out / ".parts" / "inputs.json").write_bytes(inputs[:50])
    with pytest.raises(UserError, match=r"inputs\.json: expected JSON, .* start again with --force"):
        prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=1.0)
    (out / ".parts" / "inputs.json").unlink()  # as a removal leaves it that is killed halfway
    with pytest.raises(UserError, match=r"inputs\.json: expected it beside the parts, .* start again with --force"):
        prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=1.0)
    (out / ".parts" / "inputs.json").write_bytes(inputs)
    prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=1.0)
    assert verify(out) == []


def test_rejects_are_counted_listed_and_fatal_above_the_limit(
    tokenizer_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.jsonl"
    rows = [b'{"text": "good text"}'] * 97 + [b'{"text": "bad \xff"}', b"{", b'{"text": "~ ~"}']
    file.write_bytes(b"\n".join(rows))
    corpus, out = Corpus([file]), tmp_path / "out"
    message = "expected at most 2 rejected documents .--max-rejects 0.02., got 3 of 100 documents"
    with pytest.raises(UserError, match=message):
        prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=0.02)
    listed = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert listed == [
        {"file": str(file), "line": 98, "reason": "bad encoding", "excerpt": '{"text": "bad \\xff"}'},
        {"file": str(file), "line": 99, "reason": "bad JSON", "excerpt": "{"},
        {"file": str(file), "line": 100, "reason": "no tokens", "excerpt": "~ ~"},
    ]
    assert not (out / "store.json").exists()
    facts = prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=3)
    assert facts.documents == 97 and facts.rejected == 3
    assert facts.rejected_by_reason == {"bad JSON": 1, "bad encoding": 1, "no tokens": 1}
    assert "rejected 3 of 100 documents" in caplog.text


def test_blank_cells_of_a_table_are_counted_but_are_never_too_many(tokenizer_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("title,text\none,good text\ntwo,\nthree,\nfour, \n", encoding="utf-8")
    out = tmp_path / "out"
    facts = prepare_corpus(Corpus([file]), WordTokenizer(), tokenizer_folder, out, max_rejects=0)
    assert facts.documents == 1 and facts.rejected_by_reason == {"empty document": 3}
    assert len((out / "rejects.jsonl").read_text().splitlines()) == 3

    file.write_bytes(b"title,text\none,good text\ntwo,\nthree,\nfour,\xff\n")
    message = r"at most 0 rejected .*, got 3 of 4 documents \(2 empty document, 1 bad encoding\), the first in .*line 5"
    with pytest.raises(UserError, match=message):
        prepare_corpus(Corpus([file]), WordTokenizer(), tokenizer_folder, tmp_path / "damaged", max_rejects=0)


def test_a_corpus_without_a_document_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    for number, content in enumerate(["", "\n \n", "~ ~\n"]):
        file = tmp_path / f"{number}.txt"
        file.write_text(content)
        with pytest.raises(UserError, match=r"at least one document|got 1 of 1 documents"):
            prepare_corpus(
                Corpus([file]), WordTokenizer(), tokenizer_folder, tmp_path / f"out{number}", max_rejects=1.0
            )
    file = tmp_path / "mended.txt"
    file.write_text("some words\n")  # the first attempt has left nothing to keep
    facts = prepare_corpus(Corpus([file]), WordTokenizer(), tokenizer_folder, tmp_path / "out0")
    assert facts.documents == 1


def test_documents_with_special_tokens_can_be_rejected(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, encoded = WordEncoder.encode, []

    def count(encoder: WordEncoder, documents: list[str]) -> EncodedDocuments:
        encoded.extend(documents)
        return encode(encoder, documents)

    monkeypatch.setattr(WordEncoder, "encode", count)
    texts = [f"text {n} " + ("[MASK]" if n in (0, 13, 14, 39) else "word") for n in range(40)]
    file = tmp_path / "a.txt"
    file.write_text("\n\n".join(texts))
    tokenizer = WordTokenizer(special_tokens_in_text="reject")
    facts = prepare_corpus(Corpus([file]), tokenizer, tokenizer_folder, tmp_path / "out", max_rejects=4)
    assert facts.rejected_by_reason == {"special token in text": 4} and facts.literals == {}
    lines = [json.loads(line)["line"] for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert lines == [1, 27, 29, 79]
    expected = [line_ids(text, VOCABULARY)[0] for text in texts if "[MASK]" not in text]
    assert TokenStore.open(tmp_path / "out").tokens.tolist() == list(chain(*expected))
    assert max(encoded.count(text) for text in texts) == 2, "once with the others, once apart"


@pytest.mark.parametrize("processes", [1, 2])
def test_ids_outside_the_vocabulary_are_refused_with_their_position(
    tokenizer_folder: Path, tmp_path: Path, processes: int
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("\n\n".join(f"text number{n}" for n in range(500)))
    with pytest.raises(UserError, match=r"a\.txt, documents at lines 1 to \d+: tokenizer: expected ids from 0 to 999"):
        prepare_corpus(
            Corpus([file]), WordTokenizer(beyond=9000), tokenizer_folder, tmp_path / "out", processes=processes
        )


def test_eos_needs_an_eos_token(corpus: Corpus, tokenizer_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a tokenizer with an end-of-sequence token"):
        prepare_corpus(corpus, WordTokenizer(has_eos=False), tokenizer_folder, tmp_path / "out", append_eos=True)


def test_a_tokenizer_without_word_starts(corpus: Corpus, tokenizer_folder: Path, tmp_path: Path) -> None:
    facts = prepare_corpus(
        corpus, WordTokenizer(knows_words=False), tokenizer_folder, tmp_path / "out", max_rejects=1.0
    )
    assert not facts.word_starts and not (tmp_path / "out" / "tokens.words").exists()


def test_a_file_that_changes_during_the_run_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("\n\n".join(f"text {n}" for n in range(500)))

    def change_file(done: int, total: int) -> None:
        with file.open("a") as stream:
            stream.write("more\n")

    with pytest.raises(UserError, match="changed while it was read"):
        prepare_corpus(Corpus([file]), WordTokenizer(), tokenizer_folder, tmp_path / "out", progress=change_file)
    assert not (tmp_path / "out" / "store.json").exists()


def test_two_processes_at_once_are_refused(corpus: Corpus, tokenizer_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(RUN, tmp_path, out, 1, delay=30.0)
    deadline = time.monotonic() + 60
    while not (out / ".lock").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    try:
        with pytest.raises(UserError, match=f"process {process.pid} on host .* is preparing it"):
            prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=1.0)
    finally:
        process.kill()
        process.communicate()
    prepare_corpus(corpus, WordTokenizer(), tokenizer_folder, out, max_rejects=1.0)


def test_memory_does_not_grow_with_the_corpus(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_space, "read_samples", partial(disk_space.read_samples, sample_bytes=10_000))
    monkeypatch.setattr(utf8_reader, "SAMPLE_BYTES", 10_000)
    peaks = []
    for factor in (1, 10):
        file = tmp_path / f"{factor}.jsonl.gz"
        rows = [json.dumps({"text": "abc def ghi jkl mno\n" * 20}) + "\n" for _ in range(60 * factor)]
        file.write_bytes(gzip.compress("".join(rows).encode(), 1))
        del rows
        tracemalloc.start()
        prepare_corpus(Corpus([file], block_bytes=10_000), WordTokenizer(), tokenizer_folder, tmp_path / f"out{factor}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert TokenStore.open(tmp_path / "out10").facts.tokens == 60_000
    assert peaks[1] < peaks[0] * 1.1 + 50_000


def test_progress_ends_at_the_total(corpus: Corpus, tokenizer_folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    prepare_corpus(
        corpus,
        WordTokenizer(),
        tokenizer_folder,
        tmp_path / "out",
        max_rejects=1.0,
        progress=lambda *at: seen.append(at),
    )
    assert len(seen) > 10 and seen == sorted(seen)
    assert seen[-1] == (corpus.total_bytes, corpus.total_bytes)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "a.txt",
            "市場の朝".encode("shift_jis"),
            r"got 1 of 1 documents \(1 bad encoding\), the first in .*line 1: .*\n.*\n.*iconv",
        ),
        (
            "a.jsonl",
            b'{"body": "one"}\n{"body": "two"}',
            r'got 2 of.*line 1: {"body": "one"}\n.*\n.*with --field, .* --conversations; or correct the corpus\nAll',
        ),
        (
            "b.jsonl",
            b'\xef\xbb\xbf{"body": "one"}\n\xef\xbb\xbf{"text": "two"}\n\xef\xbb\xbf{"text": "three"}',
            r"got 3 of 3 documents \(2 byte order mark, 1 missing field\).*line 2: .*\n.*\n.*remove the bytes EF BB BF",
        ),
    ],
)
def test_a_corpus_of_rejects_says_what_to_do(
    tokenizer_folder: Path, tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match="expected at least one document that is not rejected, " + expected):
        prepare_corpus(Corpus([tmp_path / name]), WordTokenizer(), tokenizer_folder, tmp_path / "out", max_rejects=1.0)


def test_unknown_tokens_are_counted_and_many_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="terakoya")
    tokenizer = make_folder(tmp_path / "tokenizer")

    def tell(name: str, words: list[str]) -> tuple[dict[str, int], str]:
        (tmp_path / f"{name}.txt").write_text("\n\n".join([" ".join(words)] * 3))
        caplog.clear()
        corpus = Corpus([tmp_path / f"{name}.txt"])
        facts = prepare_corpus(corpus, WordTokenizer(), tokenizer, tmp_path / name)
        return facts.notes, next((line.message for line in caplog.records if "are unknown" in line.message), "")

    assert tell("known", ["いろは"] * 100) == ({}, "")
    assert tell("few", ["いろは"] * 98 + ["[UNK]"] * 2) == ({"unknown tokens": 6}, "2.000 % of the tokens are unknown")
    notes, warning = tell("many", ["いろは"] * 90 + ["[UNK]"] * 10)
    assert notes == {"unknown tokens": 30} and warning.startswith("10.0 % of the tokens are unknown: the tokenizer has")
