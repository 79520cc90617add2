"""The programs of tools/bench run at toy size, and what they print can be read."""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import toy
from small_vocabularies import train_tokenizers
from tool_modules import TOOLS, load_tool
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

import terakoya
from terakoya.corpus.corpus import Corpus
from terakoya.store.token_store import open_store
from terakoya_contract import toy as contract_toy
from terakoya_places import cached_store, fetched_blocks
from terakoya_plugins.tokenizers.byte_bpe import ByteBpe
from terakoya_plugins.tokenizers.mecab_wordpiece import MecabWordPiece
from terakoya_tokenizer import mecab, word_cache
from terakoya_tokenizer.kernels import load_kernels

DEMO = Path(terakoya.__file__).parent / "corpus" / "demo_corpus.txt"
TEXT = "寺子屋では、読み書きとそろばんを習った。\n先生は町の人で、束脩は米や炭だった。"


def run(name: str, *arguments: Any, codes: tuple[int, ...] = (0,)) -> str:
    """What a bench prints; fails where it exits with another code than `codes`."""
    command = [sys.executable, TOOLS / "bench" / f"{name}.py", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


def options(**values: int) -> list[str]:
    return [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def compressed(file: Path, texts: list[str]) -> Path:
    file.write_bytes(gzip.compress("".join(json.dumps({"text": each}) + "\n" for each in texts).encode()))
    return file


# ------------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.skipif(load_kernels() is None, reason="needs a C compiler")
def test_the_encoder_is_measured_beside_mecab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ids are compared by both roads."""
    monkeypatch.syspath_prepend(str(TOOLS / "bench"))
    monkeypatch.setattr(mecab, "MECAB_CHARACTERS", 0)
    monkeypatch.setattr(word_cache, "_MANY", 0)
    corpus = compressed(tmp_path / "text.jsonl.gz", [TEXT * n for n in range(1, 9)])
    MecabWordPiece(vocab_size=200, limit_alphabet=60).train(Corpus([corpus]), tmp_path / "tokenizer")
    ceiling = load_tool("bench/ceiling")
    command = [str(corpus), "--tokenizer", str(tmp_path / "tokenizer"), "--rounds", "1"]
    assert ceiling.main([*command, "--goal", "0"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| encoder")]
    assert [row.split(" | ")[0] for row in rows] == ["| encoder", "| encoder without a C compiler"]
    assert ceiling.main([*command, "--goal", "1e9"]) == 1
    monkeypatch.setattr(ceiling.splitting.Lattice, "split", lambda self, lines: ["違う"] * len(lines))
    with pytest.raises(SystemExit, match="differ"):
        ceiling.main(command)


def test_ids_of_pieces_are_compared_in_each_round(tmp_path: Path, forks: None) -> None:
    corpus, folder = tmp_path / "corpus.jsonl.gz", tmp_path / "tokenizer"
    compressed(corpus, [f"{number}冊目の本を図書館で借りて読みました。\n面白い。" for number in range(20)])
    ByteBpe(vocab_size=300).train(Corpus([corpus]), folder)
    printed = run("pieces", corpus, "--tokenizer", folder, "--other", TOOLS.parent, "--rounds", 2)
    for kind in ("ours", "other", "tokenizers"):
        assert re.search(rf"^\| {kind} \| \d+\.\d\d \| \d+\.\d\d x \| 2 of 2 \| [1-9][\d,]* \|$", printed, re.M)


# ------------------------------------------------------------------------------------------- how soon, how well


@pytest.mark.nightly
def test_every_way_of_growth_trains_and_is_measured(tmp_path: Path, forks: None) -> None:
    store = contract_toy.make_store(tmp_path).folder
    sizes = options(hidden_size=32, layers=2, small_layers=1, small_steps=2, grown_steps=4, every=2)
    printed = run("growth", store, store, "--seeds", 1, "--steps", 2, 4, *sizes, codes=(0, 1))
    scratch = r"^seed 0 from scratch: 2 steps \d\.\d{3}, 4 steps \d\.\d{3}; the small one took \d+%"
    assert re.search(scratch, printed, re.M)
    for way in ("stack", "identity"):
        own = rf"^seed 0 {way}: begins at \d\.\d{{3}}; 2 steps (\d+|inf)%, 4 steps (\d+|inf)%$"
        assert re.search(own, printed, re.M) and re.search(rf"^{way}: 2 steps", printed, re.M)
    small = re.search(r"small model ends at (\S+)", printed)
    begins = re.search(r"seed 0 identity: begins at (\d\.\d{3})", printed)
    assert small is not None and begins is not None and small[1] == begins[1]


@pytest.mark.nightly
def test_what_longer_rows_cost_is_measured(tmp_path: Path, forks: None) -> None:
    store = toy.make_store(tmp_path / "text", documents=60, seed=1)
    sizes = options(length=8, factor=2, tokens=32, steps=2, more_steps=1, hidden_size=32, rows=2)
    printed = run("longer_rows", store, store, "--ways", "yarn", *sizes, codes=(0, 1))
    for name in ("before", "yarn"):
        assert re.search(rf"^{name} +old positions \d\.\d{{3}}, new \d\.\d{{3}}: [+-]\d+\.\d%$", printed, re.M)


def test_tokens_are_counted_to_the_line_between_two_validations() -> None:
    curve = [(0, 9.0), (100, 8.0), (200, 8.5), (300, 7.0)]
    needed = [load_tool("bench/transplant").tokens_to_reach(loss, curve) for loss in (8.25, 7.75, 9.5, 6.5)]
    assert needed == [75, 250, 0, float("inf")]


@pytest.mark.nightly
def test_every_way_of_a_transplant_trains_and_is_measured(tmp_path: Path) -> None:
    transplant = load_tool("bench/transplant")
    text = DEMO.read_text(encoding="utf-8").split("\n\n")
    given = argparse.Namespace(
        corpus=compressed(tmp_path / "corpus.jsonl.gz", text[:60]),
        validation=compressed(tmp_path / "validation.jsonl.gz", text[60:70]), documents=30,
        vocab_size=1000, hidden_size=16, source_steps=2, steps=[2, 4], transplant_steps=4, every=2, seeds=1,
    )  # fmt: skip
    (needed,) = transplant.measure(given, tmp_path)
    assert list(needed) == [2, 4] and list(needed[4]) == ["scratch", *transplant.WAYS]
    assert 0 < needed[2]["scratch"] < needed[4]["scratch"] < float("inf")


@pytest.fixture(scope="module")
def mup() -> Any:
    return load_tool("bench/mup")


def test_the_search_ends_between_two_worse_neighbours(mup: Any) -> None:
    tried: list[int] = []

    def loss(rate: int) -> float:
        tried.append(rate)
        return (rate + 6.2) ** 2

    losses = mup.search(loss, -9, 9)
    assert min(losses, key=losses.__getitem__) == -6
    assert tried == [-9, -10, -8, -7, -6, -5] and sorted(losses) == sorted(tried)
    assert len(mup.search(loss, -9, 3)) == 3


def test_the_base_width_is_the_wide_one(mup: Any) -> None:
    given = mup._options(["--store", "S", "--work", "W"])
    wide, narrow = (
        mup.settings("electra", width, 1e-3, scaled, given) for width, scaled in ((512, False), (128, True))
    )
    assert wide["mup"] is None and narrow["mup"] == {"base_width": 512}
    sizes = ("hidden_size", "embedding_size", "num_attention_heads", "intermediate_size")
    assert [wide["architecture"][each] for each in sizes] == [4 * narrow["architecture"][each] for each in sizes]


@pytest.mark.nightly
def test_the_best_rates_of_two_widths_are_compared(
    mup: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "terakoya")  # the tool sets it, too; the test sets it back
    assert mup.main(["--tiny", "--architectures", "bert"]) == 0
    printed = capsys.readouterr().out
    for kind in ("32", "16, with mup", "16, without mup"):
        assert re.search(rf"^bert, width {kind}: best \S+; \S+: \d\.\d{{3}}, \S+: \d\.\d{{3}}$", printed, re.M)
    assert re.search(r"^bert: between widths 16 and 32 .* factor of \d+ with mup and \d+ without mup$", printed, re.M)


@pytest.fixture(scope="module")
def whole_words() -> Any:
    return load_tool("bench/whole_words")


def test_an_interval_is_that_of_student(whole_words: Any) -> None:
    mean, half = whole_words.interval([1.0, 2.0, 4.5])  # deviation 1.80278, times 4.30265 / sqrt(3)
    assert mean == pytest.approx(2.5) and half == pytest.approx(4.47834, rel=1e-4)


def test_a_word_is_right_if_all_its_predicted_tokens_are(whole_words: Any) -> None:
    starts = np.array([[False, True, False, True, False], [False, False, True, True, False]])
    positions = np.array([1, 2, 3, 5, 6, 8, 9])  # words 1 2, 3, and in the second row 5 6 and 8 9
    right = np.array([True, False, True, True, True, False, False])
    assert whole_words.words_right(starts, positions, right).tolist() == [False, True, True, False]


@pytest.mark.nightly
def test_both_ways_of_masking_are_compared(
    whole_words: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = DEMO.read_text(encoding="utf-8")[:12_000]
    (tmp_path / "corpus.txt").write_text(text, encoding="utf-8")
    (tmp_path / "bytes").mkdir()
    train_tokenizers(tmp_path / "bytes", text, "bytes")
    store = str(tmp_path / "store")
    terakoya.prepare([tmp_path / "corpus.txt"], tokenizer=tmp_path / "bytes", out=store, processes=1, words="mecab")
    sizes = options(seeds=2, steps=2, hidden_size=16, layers=1, rows=8)
    folders = ["--store", store, "--validation", store, "--work", str(tmp_path / "runs")]
    assert whole_words.main([*folders, *sizes]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(bool(re.match(r"(whole words|single tokens) +[01] ", line)) for line in lines) == 4
    assert sum("from " in line and " to " in line for line in lines) == 6


# ---------------------------------------------------------------------------------------------------- time and memory


@pytest.mark.nightly
def test_predicted_hours_stand_beside_real_seconds(tmp_path: Path, forks: None) -> None:
    """In one process and in two; only a quiet machine says how near they are."""
    results = tmp_path / "results.jsonl"
    printed = run("hours", "--toy", "--seconds", 0.5, "--results", results)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    unpredicted = printed.count("nothing: the steps took too long")
    assert len(lines) + unpredicted == 2 and "largest difference" in printed
    for each in lines:
        assert each["steps"] >= 8 and each["difference"] == pytest.approx(each["predicted"] / each["real"] - 1)
        assert 0 < each["real"] < each["whole_command"]


@pytest.mark.nightly
def test_muon_is_no_burden_without_bf16() -> None:
    """On the processor with fewest instructions that people have, its products in bf16 would make a step several times
    as long."""
    printed = run("muon", "--avx2", *options(steps=8, rounds=1), codes=(0, 1))
    found = re.search(r"a step with Muon takes ([\d.]+) x", printed)
    assert found, printed
    assert float(found[1]) < 2


@pytest.mark.nightly
def test_precisions_and_masks_of_a_cpu_take_turns(tmp_path: Path) -> None:
    store = toy.make_store(tmp_path / "text", documents=60, seed=1)
    printed = run("cpu_precision", "--store", store, "--preset", "tiny_modernbert", *options(steps=1, rounds=1))
    found = re.findall(r"^bf16 is [\d.]+ x as fast as (.+)$", printed, re.MULTILINE)
    assert found == ["bf16, masks", "fp32", "fp32, masks"], printed


@pytest.mark.nightly
def test_products_are_most_of_a_step() -> None:
    lines = run("step_profile", "bert", "llama", *options(steps=2, vocabulary=2000)).splitlines()
    found = dict(line.split(": products ") for line in lines if ": products " in line)
    assert list(found) == ["bert", "llama"] and all(float(text.partition("%")[0]) > 30 for text in found.values())


@pytest.mark.nightly
def test_each_process_says_what_its_start_and_a_save_needed(forks: None) -> None:
    printed = run("start_memory", *options(hidden_size=64, layers=1))
    found = re.findall(r"rank (\d): own part \d+ MiB of \d+ MiB.*; start \d+ MiB, .*; save \d+ MiB", printed)
    assert sorted(found) == ["0", "1"], printed


@pytest.fixture(scope="module")
def idle() -> Any:
    return load_tool("bench/pipeline_idle")


@pytest.mark.parametrize(("processes", "micro_batches"), [(2, 4), (2, 8), (4, 8)])
def test_one_stage_each_waits_as_the_formula_says(idle: Any, processes: int, micro_batches: int) -> None:
    """(p - 1) / (m + p - 1), Narayanan et al., 2021, arXiv:2104.04473, section 2.2, as a share of all time."""
    expected = (processes - 1) / (micro_batches + processes - 1)
    assert idle.waiting(ScheduleInterleaved1F1B, processes, 1, micro_batches) == pytest.approx(expected)
    assert 0 < idle.waiting(ScheduleInterleavedZeroBubble, processes, 1, micro_batches) < expected


def test_a_line_is_printed_for_each_size_of_a_pipeline(idle: Any, capsys: pytest.CaptureFixture[str]) -> None:
    idle.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(idle.SIZES) and "| 4 | 1 | 8 | 27% | 11% |" in lines


def test_steps_do_not_wait_for_a_store_far_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store behind a link of 50 ms takes 3 % of a step's time at most, even with a cache of a quarter of the store,
    in which most rows find nothing: each step fetches again."""
    bench = load_tool("bench/object_store")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cached_store, "LEAST_BLOCKS", 1)
    monkeypatch.setattr(fetched_blocks, "REQUEST_BLOCKS", 1)
    fsspec.register_implementation("far", bench.FarFileSystem, clobber=True)
    monkeypatch.setattr(bench.FarFileSystem, "requests", 0)
    store = bench.make_store(tmp_path / "store", 3_000_000)
    size = sum(facts.size for facts in store.facts.files.values())
    monkeypatch.setenv(cached_store.LIMIT_VARIABLE, str(size / 4 / 1e9))
    opened = open_store(Path(f"far:/{tmp_path}/store"))
    assert isinstance(opened, cached_store.RemoteStore) and opened.budget_bytes is not None
    share, _ = bench.waits(opened, steps=10, step_seconds=0.3, rows=12)
    assert bench.FarFileSystem.requests > 10 * 8 and share <= 0.03


def test_near_duplicates_are_counted_beside_datatrove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datatrove", reason="datatrove is not installed")
    from datatrove.pipeline.dedup import minhash

    monkeypatch.setattr(minhash, "load_word_tokenizer", None)  # the bench sets another one
    bench = load_tool("bench/near_duplicates")
    missed = bench.compare(tmp_path, 2000, 1)
    assert not set(missed) - {"missed: 2 x datatrove"}  # only a quiet machine says how fast they are
    ours, datatrove, times = capsys.readouterr().out.splitlines()
    assert "0.5: 0.00 % of" in ours and all("0.9: 100.00 % of" in line for line in (ours, datatrove))
    assert re.fullmatch(r"2,000 documents: .* s, datatrove .* s of CPU time: .* x", times)
    monkeypatch.setattr(bench, "PART", 50)
    (tmp_path / "sketches").mkdir()
    bench.write_sketches(tmp_path / "sketches", 200)
    assert bench.measure_join(tmp_path / "sketches")["dropped"] == 15
