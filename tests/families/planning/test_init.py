"""`terakoya init`: what it sees of a corpus, what it chooses, and that its commented file is a pipeline."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from selection import at_night
from typer.testing import CliRunner

from terakoya.checking.fake_tensors import number_of_layers
from terakoya.commands.main import build_app
from terakoya.components import Progress
from terakoya.config.parameters import Parameters
from terakoya.config.presets import preset_names, presets_folder
from terakoya.distributed.topology import RankBatch
from terakoya.errors import UserError
from terakoya.json_settings import read_settings
from terakoya.store.subset import document_ranges
from terakoya_pipeline.settings import read_pipeline
from terakoya_planning import choosing
from terakoya_planning.choosing import FAMILIES, PAPERS, Machine, choose, choose_vocabulary, find_machine, find_recipe
from terakoya_planning.commands import init
from terakoya_planning.corpus_facts import look_at
from terakoya_planning.devices import find_device
from terakoya_planning.new_pipeline import make_tokenizer, render
from terakoya_planning.speed import Speed

JAPANESE = "東京は日本の首都です。今日はよい天気だったので、川の近くを歩きました。"
ENGLISH = "The quick brown fox jumps over the lazy dog and runs away. "
CPU = Machine(find_device("cpu"), 1, "fp32")
pytestmark = pytest.mark.usefixtures("remembered_steps")


def numbered(number: int) -> str:
    return f"{JAPANESE}{number:02}"


def corpus(folder: Path) -> list[str]:
    lines = [{"id": f"{n}", "body": numbered(n) * 3} for n in range(40)]
    text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    pq.write_table(
        pa.table({"title": ["題"] * 20, "content": [numbered(50 + n) * 2 for n in range(20)], "n": [1] * 20}),
        folder / "b.parquet",
    )
    (folder / "c.csv").write_text(
        "text,year\n" + "".join(f"{numbered(n)},2020\n" for n in range(10, 20)), encoding="utf-8"
    )
    (folder / "d.txt").write_text("".join(f"{numbered(n)}\n" for n in range(60, 90)), encoding="utf-8")
    return [str(folder / name) for name in ("a.jsonl.gz", "b.parquet", "c.csv", "d.txt")]


def test_what_it_sees_of_a_corpus_of_several_formats(tmp_path: Path) -> None:
    facts = look_at(corpus(tmp_path))
    assert (facts.files, facts.formats, facts.count) == (4, ("csv", "jsonl", "parquet", "txt"), 100)
    assert facts.field == "body,text,content" and facts.documents == "line" and facts.language == "ja"
    assert facts.characters == len(numbered(0)) * (3 * 40 + 2 * 20 + 10 + 30)


def test_text_is_taken_before_what_is_longer_and_every_format_is_looked_at(tmp_path: Path) -> None:
    rows = [{"url": "u", "html": numbered(n) * 6, "text": numbered(n)} for n in range(9)]
    for number in range(40):
        lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        (tmp_path / f"{number:02}.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "31.csv").write_text("番号,本文\n1," + numbered(1), encoding="utf-8")
    assert look_at([tmp_path]).field == "text,本文"
    assert look_at([tmp_path], field="html,本文").characters > 5 * 40 * 9 * len(numbered(0))
    only = [{key: row[key] for key in ("url", "html")} for row in rows]
    (tmp_path / "only.jsonl").write_text("\n".join(json.dumps(row) for row in only), encoding="utf-8")
    assert look_at([tmp_path / "only.jsonl"]).field == "html"


def test_the_column_with_most_text_is_read_wherever_it_is_and_a_file_with_longer_texts_elsewhere_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [f"{number},棚{number},{numbered(number) * 9}" for number in range(30)]
    (tmp_path / "a.csv").write_text("番号,名称\n" + "\n".join(f"{n},箱{n}" for n in range(200)), encoding="utf-8")
    (tmp_path / "b.csv").write_text("番号,名称,本文\n" + "\n".join(rows), encoding="utf-8")
    facts = look_at([tmp_path])
    assert facts.field == "本文,名称" and facts.characters > 30 * 9 * len(numbered(0))
    assert not caplog.records
    (tmp_path / "c.csv").write_text("本文,要約\n" + "短い。,要約は本文よりも長い。\n" * 20, encoding="utf-8")
    assert look_at([tmp_path]).field == "本文,名称,要約"
    (warning,) = caplog.messages
    assert warning.startswith(
        f"{tmp_path / 'c.csv'}: 本文 is read, as in other files, and 要約 has longer texts; give it"
    )


@pytest.mark.parametrize(("lines", "documents"), [(5, "blank"), (500, "line")])
def test_each_of_many_small_txt_files_is_a_document(tmp_path: Path, lines: int, documents: str) -> None:
    for number in range(20):
        text = "\n".join(numbered(number * 1000 + line) for line in range(lines))
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    facts = look_at([tmp_path])
    assert (facts.documents, facts.count) == (documents, 20 if documents == "blank" else 20 * lines)


def test_quotes_of_a_tsv_are_text_and_a_field_may_be_long(tmp_path: Path) -> None:
    csv.field_size_limit(131_072)  # Python's own
    (tmp_path / "b.csv").write_text("title,body\n" + "題," + "word " * 40_000 + "\n題,x\n", encoding="utf-8")
    assert look_at([str(tmp_path / "b.csv")]).field == "body"
    (tmp_path / "a.tsv").write_text("title\tbody\n" + f'"題\t{numbered(1) * 3}\n' * 20, encoding="utf-8")
    assert look_at([str(tmp_path / "a.tsv")]).field == "body"


def test_a_parquet_file_is_looked_at_in_bytes_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    whole, broken = tmp_path / "a.parquet", tmp_path / "b.parquet"
    texts = pa.array([JAPANESE.encode() * 9, JAPANESE.encode()[:20]], pa.binary())
    bad = pa.Array.from_buffers(pa.string(), 2, texts.buffers())  # the end of the second is no UTF-8
    pq.write_table(pa.table({"n": [1, 2], "body": bad, "words": [["x" * 999], ["y"]]}), whole)
    assert look_at([str(whole)], max_rejects=1).field == "body"
    broken.write_bytes(whole.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"b\.parquet: expected a whole parquet file, got a broken one"):
        look_at([str(broken)])


def test_a_large_file_is_extrapolated_from_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "e.txt").write_text((ENGLISH + "\n\n") * 50_000, encoding="utf-8")
    facts = look_at([str(tmp_path / "e.txt")])
    assert facts.characters == pytest.approx(len(ENGLISH.strip()) * 50_000, rel=0.03)
    assert (facts.language, facts.documents) == ("en", "blank") and facts.count == pytest.approx(50_000, rel=0.03)


def test_a_corpus_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.jsonl: expected text in a key or a column, found none"):
        look_at([str(tmp_path / "a.jsonl")])


def test_larger_corpora_get_larger_vocabularies() -> None:
    sizes = [choose_vocabulary(10**power, "en", causal=False) for power in range(5, 12)]
    assert sizes == sorted(sizes) and sizes[0] == 3000 and sizes[-1] == 32_768
    assert [choose_vocabulary(10**power, "ja", causal=True) for power in range(5, 12)] == sizes
    whole = [choose_vocabulary(10**power, "ja", causal=False) for power in range(5, 12)]
    assert whole == [6000, *(max(8000, size) for size in sizes[1:])], "two pieces for each character"


def chosen(tokens: float, gpu: str, count: int, hours: float, like: str = "bert") -> choosing.Choice:
    machine = find_machine(gpu, count)
    return choose(
        tokens=int(tokens), vocabulary=32_768, recipe=PAPERS[like], goal="model", machine=machine, hours=hours
    )


@pytest.mark.parametrize(("tokens", "hours", "start", "preset", "limit"), [
    (3e7, 0.25, 0, "tiny_modernbert", "hours"), (3e7, 3, 0, "bert_ja_small", "corpus"),
    (1e8, 3, 0, "bert_ja_small", "hours"), (6e6, 3, 0, "tiny_modernbert", "corpus"),
    (1e8, 1, 0, "tiny_modernbert", "hours"), (1e8, 3, 1, "tiny_modernbert", "hours"),
])  # fmt: skip
def test_the_size_is_that_whose_loss_is_expected_to_be_lowest(
    tokens: float, hours: float, start: float, preset: str, limit: str
) -> None:
    """At speeds of one core: 8,000, 2,000 and 300 tokens a second, and `start` seconds of each step of six layers,
    which make the small batches of a short run slower."""
    rates = {3: 8000, 6: 2000, 12: 300}

    def measure(parameters: Parameters, vocab_size: int, share: RankBatch, processes: int) -> Speed | None:
        layers = number_of_layers(parameters.architecture)
        seconds = share.global_rows * parameters.data.sequence_length / rates[layers] + start * (layers == 6)
        return Speed(seconds, seconds, 0.3, "probe", "as told")

    machine = replace(CPU, device=replace(CPU.device, memory=1 << 36), measure=measure)
    choice = choose(
        tokens=int(tokens), vocabulary=8000, recipe=FAMILIES["encoder"], goal="model", machine=machine, hours=hours
    )
    assert (choice.preset, choice.limit) == (preset, limit)


def test_losses_are_compared_as_they_were_measured() -> None:
    """Chinchilla's model is near the best for its compute, 5.76e23 FLOPs (Hoffmann et al. 2022, section 4); sizes after
    the same minutes of a core are in the order of tools/bench/README.md."""
    bodies = [10 ** (power / 50) for power in range(450, 600)]
    assert 60e9 < min(bodies, key=lambda body: choosing.expected_loss(body, 5.76e23 / 6 / body)) < 90e9
    tiny, small = 585_216, 3_427_456
    for in_tiny, in_small in ((4.4e6, 1.25e6), (17.2e6, 4.4e6)):
        assert choosing.expected_loss(tiny, in_tiny) < choosing.expected_loss(small, in_small)


@pytest.mark.nightly
def test_the_hours_hold_at_the_speed_that_was_measured() -> None:
    """Validations are in the hours, and a faster machine trains on more tokens."""
    speeds = {"seconds": 0.9}

    def measure(parameters: Parameters, vocab_size: int, share: RankBatch, processes: int) -> Speed | None:
        layers = number_of_layers(parameters.architecture)
        length = parameters.data.sequence_length
        seconds = speeds["seconds"] * layers / 4 * (length / 128) ** 3 * share.global_rows / 32
        return Speed(seconds, seconds, 0.3, "probe", "as told")

    def found(hours: float) -> choosing.Choice:
        machine = replace(CPU, device=replace(CPU.device, memory=1 << 36), measure=measure)
        return choose(
            tokens=10**9,
            vocabulary=4000,
            recipe=PAPERS["bert"],
            goal="model",
            machine=machine,
            hours=hours,
            held_out=10**5,
        )

    short, long = found(1), found(50)
    assert (short.preset, short.limit) == ("tiny_bert", "hours") and (long.preset, long.limit) == (
        "bert_small",
        "hours",
    )
    for choice, hours in ((short, 1), (long, 50)):
        assert 0.9 * hours < choice.hours[0] == choice.hours[1] <= hours * 1.01
    speeds["seconds"] = 0.3
    assert found(1).trained_tokens == pytest.approx(3 * short.trained_tokens, rel=0.05)


@pytest.mark.nightly
def test_the_model_grows_with_the_corpus_and_the_hours() -> None:
    small, middle, large = (chosen(tokens, "h100", 1, 48) for tokens in (3e6, 5e7, 2e9))
    assert [each.preset for each in (small, middle, large)] == ["tiny_bert", "bert_small", "bert_large"]
    assert small.limit == middle.limit == "corpus" and large.limit == "family"
    short = chosen(2e9, "rtx-4090", 1, 0.2)
    assert short.preset == "bert_small" and short.limit == "hours"
    for each in (small, middle, large, short):
        parameters = Parameters.from_dict(each.parameters, source="chosen")
        assert each.passes <= 40.1 and each.estimated.fits and each.hours[1] <= 48.1
        assert parameters.precision == "auto" and parameters.max_steps == each.steps
        assert each.trained_tokens == each.steps * sum(parameters.batch_size.values()) * parameters.data.sequence_length


@pytest.mark.parametrize(("has_bf16", "precision"), [(True, "bf16"), (False, "fp16")])
def test_a_gpu_in_no_list_is_measured(has_bf16: bool, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card = choosing.devices.Device("NVIDIA GeForce RTX 4080", 16 << 30, None)
    monkeypatch.setattr(choosing.devices, "local_device", lambda: card)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("terakoya.toolkit.fast_products.multiplies_fast", lambda *asked: has_bf16)
    machine = find_machine(None, None, measure=lambda *run: Speed(0.1, 0.1, 0.3, "probe", "as told"))
    assert (machine.count, machine.precision) == (2, precision)
    choice = choose(tokens=10**6, vocabulary=32_768, recipe=FAMILIES["encoder"], goal="model", machine=machine, hours=1)
    assert choice.parameters["precision"] == "auto" and choice.estimated.device == card and choice.estimated.fits
    with pytest.raises(UserError, match="the speed of NVIDIA GeForce RTX 4080 is unknown; measure it there"):
        find_machine(None, None)


@pytest.mark.parametrize(("is_fast", "precision"), [(True, "bf16"), (False, "fp32")])
def test_a_cpu_trains_in_the_precision_that_it_multiplies_fast(
    is_fast: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terakoya.toolkit.fast_products.multiplies_fast", lambda *asked: is_fast)
    monkeypatch.setattr(choosing.devices, "local_device", lambda: CPU.device)
    assert find_machine(None, None).precision == precision


@pytest.mark.nightly
def test_a_model_that_one_gpu_cannot_hold_is_sharded_or_left() -> None:
    assert chosen(1e12, "rtx-4090", 1, 1e6, "llama").preset == "llama_1b"
    sharded = chosen(1e12, "h100", 8, 1e6, "llama")
    assert sharded.preset == "llama_8b" and sharded.parameters["parallel"]["engine"] == "fsdp"
    assert sharded.parameters["micro_batch_size"] * 8 <= sum(sharded.parameters["batch_size"].values())


def test_every_family_has_presets_and_a_tokenizer() -> None:
    assert choosing.Goal.__args__ == init.Goal.__args__
    assert {each for one in (*FAMILIES.values(), *PAPERS.values()) for each in one.presets} <= {*preset_names()}
    assert make_tokenizer(PAPERS["gpt2"], "ja", 8000)["type"] == "sentencepiece"
    assert make_tokenizer(FAMILIES["electra"], "ja", 8000)["dictionary"] == "unidic_lite"
    assert make_tokenizer(PAPERS["bert"], "en", 8000)["word_tokenizer"] == "basic"


@pytest.mark.parametrize(("family", "like", "preset"), [
    (None, None, "bert_ja_base"), ("encoder", None, "bert_ja_base"), ("electra", None, "electra_ja"),
    (None, "electra", "electra_base"), (None, "bert", "bert_large"), (None, "modernbert", "modernbert_base"),
])  # fmt: skip
def test_an_encoder_is_of_the_recipe_that_learns_soonest_unless_a_paper_is_named(
    family: str | None, like: str | None, preset: str
) -> None:
    assert find_recipe(family, like).presets[-1] == preset


@pytest.mark.parametrize(("family", "like", "message"), [
    ("bert", None, "the recipe of its paper is --like bert"), ("encodr", None, 'did you mean "encoder"'),
    (None, "bart", 'did you mean "bert"'), ("encoder", "bert", "expected one of them"),
])  # fmt: skip
def test_recipes_that_are_not_there_are_refused(family: str | None, like: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_recipe(family, like)


@pytest.mark.parametrize(
    "recipe", [*FAMILIES.values(), *PAPERS.values()], ids=[*FAMILIES, *(f"like {each}" for each in PAPERS)]
)
def test_every_run_ends_with_a_tenth_of_its_rate_at_most(recipe: choosing.Recipe) -> None:
    """Whatever its length, also where the preset is a trunk."""
    machine = Machine(find_device("h200"), 8, "bf16")
    for preset, trained in itertools.product(recipe.presets, (1e7, 3e9, 1e12)):
        raw = read_settings(presets_folder() / f"{preset}.json")
        run = next(choosing._runs(raw, trained=trained, machine=machine))
        parameters = Parameters.from_dict(run, source=preset)
        rate, steps, tokens = parameters.optimizer.learning_rate, run["max_steps"], int(trained)
        end = Progress(step=steps, max_steps=steps, tokens=tokens, max_tokens=tokens, learning_rate=rate)
        assert parameters.schedule.factor(end) <= 0.1


def test_a_preset_whose_rate_ends_high_ends_low() -> None:
    raw = read_settings(presets_folder() / "gpt2_125m.json")
    raw["schedule"]["min_lr"] = raw["optimizer"]["learning_rate"] / 2
    run = next(choosing._runs(raw, trained=1e8, machine=Machine(find_device("h200"), 8, "bf16")))
    assert run["schedule"]["min_lr"] == run["optimizer"]["learning_rate"] / 10


@pytest.mark.parametrize(("preset", "trained", "processes", "rows", "rate"), [
    ("bert_ja_small", 1e6, 1, 4, 4.5e-3), ("bert_ja_small", 1e6, 8, 8, 5.6e-3), ("bert_ja_small", 9e6, 1, 4, 2.1e-3),
    ("bert_ja_small", 1e8, 1, 32, 4e-3), ("bert_ja_small", 1e10, 1, 64, 2.1e-3),
    ("tiny_modernbert", 1e5, 1, 16, 1.1e-2), ("tiny_modernbert", 8.7e6, 1, 16, 4.3e-3),
    ("bert_base", 1e6, 1, 4, 1.3e-5), ("bert_base", 1e9, 1, 256, 1e-4),
])  # fmt: skip
def test_a_short_run_gets_small_batches_and_the_rate_follows_width_steps_and_batch(
    preset: str, trained: float, processes: int, rows: int, rate: float
) -> None:
    """Muon's: of a wide model and of many small steps it is lower, of a larger batch no higher than the preset's."""
    raw = read_settings(presets_folder() / f"{preset}.json")
    run = next(choosing._runs(raw, trained=trained, machine=Machine(find_device("h200"), processes, "bf16")))
    assert (run["batch_size"], run["optimizer"]["learning_rate"]) == ({"-1": rows}, rate)
    assert run["max_steps"] == round(trained / rows / raw["data"]["sequence_length"])


@pytest.mark.parametrize(
    ("steps", "validation", "batches", "checkpoint"),
    [(10, 10, 10, 10), (60, 25, 10, 25), (400, 40, 10, 40), (2000, 200, 30, 200), (100_000, 5000, 50, 10_000)],
)
def test_short_runs_are_not_all_validation(steps: int, validation: int, batches: int, checkpoint: int) -> None:
    raw = read_settings(presets_folder() / "tiny_modernbert.json")
    run = next(choosing._runs(raw, trained=steps * 2048, machine=Machine(CPU.device, 1, "fp32")))
    found = run["max_steps"], run["evaluation"], run["checkpoint"]["save_steps"]
    assert found == (steps, {"steps": validation, "batches": batches}, checkpoint)


@pytest.mark.parametrize(("seconds", "apart", "validation"), [(0.5, 3600, 3600), (9.0, 200, 334), (100.0, 25, 334)])
def test_a_run_that_is_killed_loses_half_an_hour_or_few_steps(seconds: float, apart: int, validation: int) -> None:
    """Of a run of 20 days, whose tenth is two. A validation of 50 batches takes as long as a 20th of 334 steps."""

    def measure(parameters: Parameters, vocab_size: int, share: RankBatch, processes: int) -> Speed | None:
        return Speed(seconds, seconds, 0.3, "probe", "as told")

    machine = replace(CPU, device=replace(CPU.device, memory=1 << 36), measure=measure)
    choice = choose(
        tokens=10**9, vocabulary=4000, recipe=PAPERS["bert"], goal="model", machine=machine, hours=480, held_out=10**5
    )
    assert choice.parameters["checkpoint"]["save_steps"] == apart
    assert choice.parameters["evaluation"] == {"steps": validation, "batches": 50}


def test_a_t5_gets_sentinels() -> None:
    assert make_tokenizer(FAMILIES["t5"], "ja", 8000)["num_unused_tokens"] == 26
    assert make_tokenizer(FAMILIES["t5"], "en", 8000)["num_unused_tokens"] == 26


def test_comments_stand_above_their_keys_and_nothing_is_lost(tmp_path: Path) -> None:
    content: dict[str, Any] = {"a": 1, "b": {"c": [1, "//"], "d": {"e": "x" * 120}}, "f": "end"}
    text = render(content, {"a": "one", "b.c": "two " * 60}, heading="made by hand")
    lines = text.splitlines()
    assert lines[:4] == ["// made by hand", "{", "  // one", '  "a": 1,'] and max(map(len, lines)) < 140
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    from terakoya.json_settings import read_settings

    assert read_settings(tmp_path / "x.json") == content


@pytest.mark.usefixtures("forks")
def test_the_command_writes_a_pipeline_that_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choosing, "find_machine", lambda gpu, count, measure: CPU)
    files = [Path(each).name for each in corpus(tmp_path)]
    words = ["init", *files, "--like", "bert", "--goal", "try", "--vocab-size", "200"]
    done = CliRunner().invoke(build_app(), words)
    assert done.exit_code == 0, done.output
    assert done.stderr.endswith("next: terakoya run pipeline.json\n")
    pipeline = read_pipeline(Path("pipeline.json"))
    assert pipeline.corpus == tuple(files) and pipeline.field == "body,text,content"
    text = Path("pipeline.json").read_text(encoding="utf-8")
    for word in (
        "// Written by `terakoya init a.jsonl.gz",
        "passes over about",
        "by a hash of their text",
        "tiny_bert",
    ):
        assert word in text
    assert "--vocab-size 200`. Change" in " ".join(text.replace("//", "").split()), "with it the file is the same"
    again = CliRunner().invoke(build_app(), words)
    assert again.exit_code and "exists already" in str(again.exception)
    assert CliRunner().invoke(build_app(), [*words, "--force"]).exit_code == 0
    assert isinstance(pipeline.parameters, dict)
    short = pipeline.parameters | {"max_steps": 2, "logging_steps": 1, "batch_size": {"-1": 2}, "micro_batch_size": 2}
    short |= {"evaluation": {"steps": 1}, "checkpoint": {"save_steps": 1}, "schedule": {"type": "constant"}}
    small = pipeline.model_dump(mode="json") | {"parameters": short, "processes": 1, "training_processes": 1}
    Path("small.json").write_text(json.dumps(small), encoding="utf-8")
    ran = CliRunner().invoke(build_app(), ["run", "small.json"])
    assert ran.exit_code == 0, ran.output + repr(ran.exception)
    assert Path("work/model/config.json").is_file() and Path("work/store.val/store.json").is_file()


@pytest.mark.parametrize("is_large", [True, False])
def test_a_run_for_another_machine_says_what_is_not_known(
    is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hours, where the corpus would suffice for more; a small one is passed over 40 times whatever the speed."""
    monkeypatch.chdir(tmp_path)
    row = json.dumps({"title": numbered(1) * 9, "body": numbered(2) * (150 if is_large else 1)}, ensure_ascii=False)
    Path("a.jsonl").write_text("\n".join([row] * 500), encoding="utf-8")
    words = ["--gpu", "h100", "--gpus", "2", "--hours", "0.1", "--field", "body", "--vocab-size", "200"]
    done = CliRunner().invoke(build_app(), ["init", "a.jsonl", *words])
    assert done.exit_code == 0, done.output
    assert "The text is that of body." in done.stdout
    assert ("this command measures the speed" in done.stdout) is is_large
    text = Path("pipeline.json").read_text(encoding="utf-8")
    assert '"deterministic": true' in text and "1.47 times" in text and '"training_processes": 2' in text
    assert "--field body" in " ".join(text.replace("//", "").split()) and '"field": "body"' in text


@pytest.mark.parametrize(
    ("documents", "held_out", "split"),
    at_night([(1, 0, None), (2, 1, (50, 50)), (30, 6, (80, 20)), (99, 20, (80, 20))], always=[(2, 1, (50, 50))]),
)
def test_few_documents_are_split_without_chance(
    documents: int, held_out: int, split: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the hashes of their text, none of them might be held out, or all."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choosing, "find_machine", lambda gpu, count, measure: CPU)
    lines = [json.dumps({"text": numbered(number) * 3}, ensure_ascii=False) for number in range(documents)]
    Path("a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words = ["init", "a.jsonl", "--like", "bert", "--goal", "try", "--vocab-size", "200"]
    done = CliRunner().invoke(build_app(), words)
    assert done.exit_code == 0, done.output
    pipeline = read_pipeline(Path("pipeline.json"))
    assert pipeline.validation_store is None and pipeline.clean == ({"type": "exact_duplicates"},)
    assert isinstance(pipeline.parameters, dict)
    data = pipeline.parameters["data"] | {"train": ["work/store"]}
    parameters = Parameters.from_dict(pipeline.parameters | {"data": data}, source="pipeline.json")
    assert parameters.data.split == split and bool(parameters.evaluation) == (documents > 1)
    assert parameters.data.odd_split() is None
    assert document_ranges(documents, split or (1, 0))[1] == (documents - held_out, documents)
    reason = f"takes the last {held_out} of {documents}." if split else "There is one document"
    assert reason in done.stdout and reason in Path("pipeline.json").read_text(encoding="utf-8")


def test_questions_are_asked_in_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(build_app(), ["init"])
    assert isinstance(done.exception, UserError) and "CORPUS: expected files of text" in str(done.exception)
    corpus(tmp_path)
    answers = {
        "corpus": ["nothing.txt", str(tmp_path)],
        "family": ["encode", "decoder"],
        "goal": ["model"],
        "GPU": ["h10", ""],
        "hours": ["soon", "nan", "0.02"],
    }

    def prompt(question: str, **_: Any) -> str:
        assert max(map(len, question.splitlines())) < 80
        return answers[question.partition(":")[0].split()[0]].pop(0)

    def choose(**given: Any) -> NoReturn:
        raise LookupError(
            f"{given['recipe'].presets[1]} {given['goal']} {given['machine'].device.name} {given['hours']}"
        )

    monkeypatch.setattr(init, "_asks", lambda: True)
    monkeypatch.setattr("typer.prompt", prompt)
    monkeypatch.setattr(choosing, "choose", choose)
    done = CliRunner().invoke(build_app(), ["init"])
    assert str(done.exception) == "gpt_ja model cpu 0.02"
    assert not any(answers.values()), "a wrong answer is asked for again"
    refused = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    expected = ("nothing.txt", 'did you mean "encoder"', 'device "h10": not known', '"soon"', '"nan"')
    assert len(refused) == len(expected) and all(part in line for part, line in zip(expected, refused, strict=True))


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (["--goal", "model", "--hours", "1"], []),
        (["--goal", "try"], []),
        (["--goal", "model"], ["GPU"]),
        (["--hours", "1"], ["goal:", "GPU"]),
        (["--hours", "1", "--gpu", "h100"], ["goal:"]),
        (["--yes"], []),
    ],
)
def test_the_gpu_is_asked_for_only_where_the_plan_is_open(
    given: list[str], asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where goal and hours are given, the machine is looked at without a question."""
    monkeypatch.chdir(tmp_path)
    questions: list[str] = []

    def prompt(question: str, **_: Any) -> str:
        questions.append(question.split()[0])
        return "model" if question.startswith("goal") else ""

    def find_machine(gpu: str | None, count: int | None, *, measure: object) -> NoReturn:
        raise LookupError(f"machine {gpu}")

    monkeypatch.setattr(init, "_asks", lambda: True)
    monkeypatch.setattr("typer.prompt", prompt)
    monkeypatch.setattr(choosing, "find_machine", find_machine)
    files = [Path(each).name for each in corpus(tmp_path)]
    done = CliRunner().invoke(build_app(), ["init", *files, "--like", "bert", *given])
    assert str(done.exception) == f"machine {'h100' if '--gpu' in given else None}" and questions == asked
