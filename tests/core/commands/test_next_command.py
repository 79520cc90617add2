"""Every command names the next one, and its help has an example that exists."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import toy
from documented_commands import check_command, find_command, root_command
from typer.testing import CliRunner

from terakoya.commands.guidance import next_command
from terakoya.commands.main import build_app
from terakoya.components import JobState
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.config.presets import find_parameters
from terakoya.json_settings import read_settings
from terakoya.plugins import loading as plugins
from terakoya.plugins.run_record import record_plugins
from terakoya.runs.checkpoints import FORMAT, with_hash
from terakoya.store.subset import document_ranges
from terakoya.store.token_store import StoreFacts
from terakoya_contract.commands.new import TEMPLATES
from terakoya_contract.toy import make_tokenizer
from terakoya_launch.commands import jobs

SMALL = ["hidden_size=16", "num_hidden_layers=1", "num_attention_heads=2", "intermediate_size=32"]


def all_commands(command: Any = None, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path]
    for name, child in getattr(command or root_command(), "commands", {}).items():
        found += all_commands(child, (*path, name))
    return found


def find(path: tuple[str, ...]) -> Any:
    return find_command(list(path))[0]


@pytest.mark.parametrize("path", all_commands(), ids=" ".join)
def test_every_help_has_an_example_that_exists(path: tuple[str, ...]) -> None:
    helped = CliRunner().invoke(build_app(), [*path, "-h"], prog_name="terakoya")
    assert helped.exit_code == 0, helped.output
    shown = helped.output.partition("Example:\n")[2].strip()
    assert max(map(len, shown.splitlines())) <= 78, "a narrow terminal would cut it within a word"
    example = re.sub(r" \\\n +", " ", shown)
    assert example.startswith(" ".join(["terakoya", *path]))
    if path[:1] not in (("launch",), ("import",)):
        check_command(example.partition(" > ")[0])


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in CliRunner().invoke(build_app(), ["--help"]).output
    asked = {"_TERAKOYA_COMPLETE": "complete_bash", "COMP_WORDS": "terakoya expo", "COMP_CWORD": "1"}
    assert CliRunner().invoke(build_app(), [], env=asked, prog_name="terakoya").output.split() == ["export"]


def run(words: list[str]) -> tuple[list[str], str]:
    """Runs `terakoya WORDS`; returns the words of the command that it names next, and its standard output."""
    done = CliRunner().invoke(build_app(), words, prog_name="terakoya")
    assert done.exit_code == 0, done.output + repr(done.exception)
    named = [line for line in done.stderr.splitlines() if line.startswith("next: ")]
    assert len(named) == 1 and "next: " not in done.stdout, done.output
    following = shlex.split(named[0].removeprefix("next: "))
    check_command(shlex.join(following))
    return following[1:], done.stdout


@pytest.mark.usefixtures("forks")
def test_the_chain_from_text_to_an_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "東京 は 日本 の 首都 です 。 今日 は よい 天気 だ"
    Path("a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for _ in range(40)), encoding="utf-8")
    Path("b.csv").write_text("text,n\n" + "".join(f"{text},{n}\n" for n in range(20)), encoding="utf-8")
    words = ["tokenizer", "train", "a.jsonl", "b.csv", "--field", "text,body", "--type", "mecab_wordpiece"]
    following, _ = run([*words, "--vocab-size", "60", "--out", "work/tokenizer"])
    assert following[:3] == ["prepare", "a.jsonl", "b.csv"] and following[-2:] == ["--field", "text,body"]
    following, out = run([*following, "--processes", "1"])
    assert "60 documents" in out and following[:4] == ["train", "tiny_modernbert", "--out", "work/run"]
    sizes = [word for each in SMALL for word in ("--set", f"architecture.{each}")]
    short = ["--set", "max_steps=2", "--set", "schedule.warmup_steps=0", "--set", "batch_size.-1=2", *sizes]
    dry, _ = run([*following, *short, "--dry-run"])
    assert dry == [*following, *short]
    following, _ = run(dry)
    assert following == ["export", "work/run", "--out", "work/model"]
    following, _ = run(following)
    assert following == ["try", "work/model", "東京は日本の[MASK]です。"]
    following, _ = run(following)
    card = ["--run", "work/run/checkpoints/step-00000002"], ["--prompt", "東京は日本の[MASK]です。"]
    upload = ["upload", "work/model", "--name", "ORGANISATION/model"]
    assert following == [*upload, *card[0], *card[1], "--dry-run", "work/upload"]
    following, _ = run(following)
    assert following == [*upload, *card[0], *card[1]]
    assert "## Training" in Path("work/upload/README.md").read_text(encoding="utf-8")
    manifest = Path("work/run/checkpoints/step-00000002/manifest.json")
    recorded = json.loads(manifest.read_bytes())
    recorded["files"]["model/model.safetensors"]["sha256"] = "0" * 64  # another checkpoint of the same name
    manifest.write_text(json.dumps(recorded), encoding="utf-8")
    assert next_command.upload_words(Path("work/model")) == (*upload[:1], Path("work/model"), *upload[2:], "--dry-run",
                                                             Path("work/upload"))  # fmt: skip


@pytest.mark.parametrize(
    ("folders", "sentence"),
    [
        ({"": {"architectures": ["ElectraForPreTraining"]}}, "東京は日本の首都です。"),
        (
            {"": {"architectures": ["DebertaV2ForTokenClassification"], "label2id": {"original": 0, "replaced": 1}}},
            "東京は日本の首都です。",
        ),
        (
            {"generator": {"architectures": ["ElectraForMaskedLM"]},
             "discriminator": {"architectures": ["ElectraForPreTraining"]}},
            "東京は日本の[MASK]です。",
        ),
        ({"": {"architectures": ["ElectraForMaskedLM"]}}, "東京は日本の[MASK]です。"),
    ],
    ids=["discriminator", "token classifier", "both", "generator"],
)  # fmt: skip
def test_a_model_is_tried_on_a_text_of_its_kind(
    folders: dict[str, dict[str, Any]], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, config in folders.items():
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    next_command.after_model(tmp_path)
    assert shlex.split(capsys.readouterr().err)[-1] == sentence


def test_a_model_that_is_not_japanese_is_tried_in_english(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"]}))
    next_command.after_model(tmp_path)
    assert shlex.split(capsys.readouterr().err)[-1] == "London is the [MASK] of England."


def facts(
    tokens: int, mask: int | None, answers: bool = False, word_starts: bool = True, documents: int = 100
) -> StoreFacts:
    return StoreFacts(
        unit="document", eos=None, documents=documents, sequences=documents, tokens=tokens, dtype="uint16",
        word_starts=word_starts,
        vocabulary=Vocabulary(size=100, mask=mask), fingerprint="", inputs={}, options={}, files={}, answers=answers,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "mask", "preset"),
    [
        (1_000_000, 4, "tiny_modernbert"), (100_000_000, 4, "bert_ja_small"), (2_000_000_000, 4, "bert_ja"),
        (1_000_000, None, "gpt_ja_small"), (2_000_000_000, None, "gpt_ja"),
    ],
)  # fmt: skip
def test_the_preset_fits_the_store(tokens: int, mask: int | None, preset: str) -> None:
    assert next_command.preset_for(facts(tokens, mask)) == preset


def test_the_stores_are_named_where_the_preset_has_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def named(out: str) -> str:
        next_command.after_store(Path(out), facts(10, 4))
        return capsys.readouterr().err.strip()

    monkeypatch.chdir(tmp_path)
    alone = named("work/store")
    assert alone.endswith("""--set 'data.split=[98,2]' --set 'data.validation=[]'""")
    Path("work/store.val").mkdir(parents=True)
    assert named("work/store") == named("work/store.val") == "next: terakoya train tiny_modernbert --out work/run"
    assert """'data.train=["w/a"]'""" in named("w/a.val") and """'data.validation=["w/a.val"]'""" in named("w/a.val")


@pytest.mark.parametrize("documents", [1, 2, 3, 24, 25, 26, 50, 51, 75, 1000])
def test_the_split_leaves_documents_for_both_sides(
    documents: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    next_command.after_store(Path("a/store"), facts(10, 4, documents=documents))
    words = shlex.split(capsys.readouterr().err.strip())
    overrides = [words[n + 1] for n, word in enumerate(words) if word == "--set"]
    preset = read_settings(find_parameters(Path("tiny_bert")))
    data = Parameters.from_dict(preset, source="tiny_bert", overrides=overrides).data
    if documents == 1:
        assert data.split is None and not data.validation
        return
    assert data.split is not None
    (first, bound), (_, stop) = document_ranges(documents, data.split)
    assert first == 0 < bound < stop == documents and stop - bound <= max(1, 0.03 * documents)


def test_a_store_without_word_starts_is_not_masked_by_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("work/store.val").mkdir(parents=True)
    for mask, wanted in ((4, " --set objective.whole_word_mask=false"), (None, "")):
        next_command.after_store(Path("work/store"), facts(10, mask, word_starts=False))
        assert capsys.readouterr().err.strip().partition(" --out work/run")[2] == wanted


@pytest.mark.usefixtures("fresh_plugins")
def test_the_next_command_has_the_plugins_that_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text((TEMPLATES / "schedule.py").read_text().replace('"example"', '"mine"'))
    given = ["--plugin", "mine.py", "--without", "third-party"]
    assert run([*given, "parameters", "list"])[0][:5] == [*given, "estimate"]
    assert next_command.line("init") == "next: terakoya init"  # not those of a command that has ended
    with next_command.carrying([("--plugin", "a b.py"), ("--plugin", "c.py")], ["train"]):
        assert next_command.line("train", "x") == "next: terakoya --plugin 'a b.py' --plugin c.py train x"
        assert next_command.line("--plugin=c.py", "train") == "next: terakoya --plugin 'a b.py' --plugin=c.py train"
        assert next_command.line("--plugin", "c.py", "train").count("c.py") == 1


def test_a_next_command_that_nobody_has_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with next_command.carrying([], ["train"]):
        for words in (["greet", "train"], ["--plugin=f.py", "--without", "train", "greet"]):
            next_command.show(*words)
        assert not capsys.readouterr().err
        next_command.show("--plugin", "f.py", "train", "x")
    assert capsys.readouterr().err == "next: terakoya --plugin f.py train x\n"


@pytest.mark.usefixtures("fresh_plugins")
def test_the_next_command_has_the_plugins_that_the_run_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text((TEMPLATES / "schedule.py").read_text().replace('"example"', '"mine"'))
    parameters = toy.parameters(Path("store"), schedule={"type": "mine"})
    Path("p.json").write_text(json.dumps(parameters))
    used = {"parameters": parameters, "plugins": record_plugins(plugins.load(["mine.py"]), parameters)}
    save(run_folder(Path("done"), {"kind": "finished", "step": 9}), **used)
    save(run_folder(Path("stopped"), {"kind": "stopped", "step": 9}), **used)
    exported, again = ["export", "done", "--out", "model"], ["train", "stopped/parameters.json", "--out", "stopped"]
    assert run(["--plugin", "./mine.py", "status", "done"])[0] == ["--plugin", "./mine.py", *exported]

    monkeypatch.setattr(plugins, "_current", None)
    monkeypatch.setenv(plugins.PLUGINS_VARIABLE, "")
    given = ["--plugin", "mine.py"]
    assert run(["status", "done"])[0] == [*given, *exported]
    assert run(["status", "stopped"])[0] == [*given, *again]
    assert next_command.export_words(Path("done/checkpoints/step-00000009"))[:3] == (*given, "export")
    refused = CliRunner().invoke(build_app(), ["train", "p.json", "--out", "done"])
    told = "done: plugin mine (--plugin: schedules/mine) is missing; load it: terakoya --plugin mine.py ..."
    assert "schedule mine: not installed" in str(refused.exception)
    assert str(refused.exception).splitlines()[-1] == told
    os.chdir("/")
    assert run(["status", str(tmp_path / "done")])[0][:2] == ["--plugin", str(tmp_path / "mine.py").lstrip("/")]
    os.chdir(tmp_path / "done")
    assert run(["status", str(tmp_path / "done")])[0][:2] == ["--plugin", str(tmp_path / "mine.py")]


def test_machine_output_names_nothing(tmp_path: Path) -> None:
    listed = CliRunner().invoke(build_app(), ["parameters", "list", "--json"])
    assert "next:" not in listed.stderr and "next:" in CliRunner().invoke(build_app(), ["parameters", "list"]).stderr
    estimated = ["estimate", "tiny_bert", "--vocab-size", "100", "--no-measure", "--json"]
    assert "next:" not in CliRunner().invoke(build_app(), estimated).stderr
    assert find_command(["estimate"])[0].name == "estimate"


NAMES_NONE = {"parameters schema", "plugins new", "compare"}
"""A JSON Schema is for a program, a new plugin comes with four steps of its own, and a comparison is an answer."""


@pytest.mark.parametrize("path", [path for path in all_commands() if path and not hasattr(find(path), "commands")])
def test_every_command_knows_a_next_one(path: tuple[str, ...]) -> None:
    module = importlib.import_module(find(path).callback.__module__)
    assert hasattr(module, "next_command") or " ".join(path) in NAMES_NONE, module


def run_folder(folder: Path, *records: dict[str, Any], batch_size: dict[str, int] | None = None) -> Path:
    folder.mkdir()
    (folder / "parameters.json").write_text(json.dumps({"max_steps": 9, "batch_size": batch_size or {"-1": 4}}))
    start = {"kind": "start", "step": 0, "world": {"processes": 2 if len(records) > 1 else 1}}
    lines = [json.dumps({**each, "time": time.time()}) + "\n" for each in (start, *records)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def save(folder: Path, **facts: Any) -> None:
    """Gives the run `folder` a checkpoint of step 9 without files."""
    checkpoint = folder / "checkpoints/step-00000009"
    checkpoint.mkdir(parents=True)
    written = with_hash({"format": FORMAT, "step": 9, "files": {}, **facts})
    (checkpoint / "manifest.json").write_text(json.dumps(written))


def test_nothing_that_fails_follows_a_run_whose_checkpoints_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    saved = {"kind": "checkpoint", "step": 9}
    report = ["report", "gone", "--out", "report.html"]
    for end in ("finished", "stopped", "error"):
        folder = run_folder(Path("gone"), saved, {"kind": end, "step": 9, "text": "no"})
        following, shown = run(["status", "gone"])
        assert following == report and "gone: the run has saved some, and checkpoints/ holds none" in shown, end
        shutil.rmtree(folder)
    run_folder(Path("gone"), saved, {"kind": "finished", "step": 9})
    assert run(report)[0] == ["status", "gone"]
    found = CliRunner().invoke(build_app(), ["verify", "gone"])
    assert "listed above\nnext: bring the checkpoints of gone back from a copy, or train" in str(found.exception)
    over = {"kind": "resume", "step": 0, "folder": None}
    run_folder(Path("over"), saved, over, {"kind": "step", "step": 3, "loss": 2.5}, {"kind": "error", "text": "no"})
    following, shown = run(["status", "over"])
    assert following[0] == "train" and "none yet" in shown


def test_what_follows_fits_the_state_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    step = {"kind": "step", "step": 3, "loss": 2.5}
    save(run_folder(Path("done"), {"kind": "finished", "step": 9}))
    run_folder(Path("stopped"), {"kind": "stopped", "step": 3, "reason": "SIGINT"})
    run_folder(Path("two"), step, {"kind": "error", "step": 3, "text": "no"})
    assert run(["status", "done"])[0] == ["export", "done", "--out", "model"]
    assert run(["report", "done", "--out", "a.html"])[0] == ["export", "done", "--out", "model"]
    again = ["train", "stopped/parameters.json", "--out", "stopped"]
    assert run(["status", "stopped"])[0] == again
    assert run(["status", "two"])[0] == ["train", "two/parameters.json", "--out", "two", "--processes", "2"]
    assert run(["status", "done", "two"])[0] == ["report", "done", "two", "--out", "report.html"]
    assert run(["report", "done", "two", "--out", "a.html"])[0] == ["status", "done", "two"]
    assert "next:" not in CliRunner().invoke(build_app(), ["status", "done", "--json"]).stderr
    run_folder(Path("nodes"), {"kind": "stopped", "step": 3}, batch_size={"0": 4, "1": 4})
    told = CliRunner().invoke(build_app(), ["status", "nodes"]).stderr
    assert told == "next: the command that started nodes continues it\n"
    (Path("done") / "checkpoints/step-00000009/manifest.json").write_text("{")
    assert run(["status", "done"])[0] == ["verify", "done"]


def test_what_follows_fits_a_store(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(store, "work/store")
    train = [
        "train",
        "tiny_modernbert",
        "--out",
        "work/run",
        "--set",
        "data.split=[98,2]",
        "--set",
        "data.validation=[]",
    ]
    train[3:] = ["work/run", "--set", 'data.train=["work/store"]', *train[4:]]
    for verb in ("info", "count", "verify"):
        assert run(["store", verb, "work/store"])[0] == train, verb
    assert run(["verify", "work/store"])[0] == train
    assert run(["store", "count", "work/store", "work/store"])[0] == ["store", "info", "work/store"]
    assert "next:" not in CliRunner().invoke(build_app(), ["store", "info", "work/store", "--json"]).stderr
    following, _ = run(["store", "split", "work/store", "--parts", "1,3", "--out", "small", "--out", "large"])
    assert 'data.train=["large"]' in following and 'data.validation=["small"]' in following
    following, _ = run(["store", "export-blocks", "work/store", "--out", "blocks.jsonl", "--block-size", "8"])
    assert following[:3] == ["store", "import-blocks", "blocks.jsonl"] and following[-1] == "work/store.blocks"
    tokens = Path("work/store/tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-2] + b"\1\0")
    for words in (["verify"], ["store", "verify"]):
        found = CliRunner().invoke(build_app(), [*words, "work/store"])
        assert "listed above\nnext: restore work/store from a copy; or remove it" in str(found.exception)


def test_what_follows_fits_a_submitted_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def named(state: JobState, run: Path | None) -> str:
        jobs._show_next("slurm", "77", state, run)
        return capsys.readouterr().err.strip().removeprefix("next: terakoya ")

    monkeypatch.chdir(tmp_path)
    done = run_folder(Path("done"), {"kind": "finished", "step": 9})
    assert named(JobState("RUNNING"), done) == "launch slurm status 77 --watch"
    assert named(JobState("FAILED", done=True, failed=True), done) == "launch slurm logs 77"
    assert named(JobState("COMPLETED", done=True), done) == "export done --out model"
    assert named(JobState("COMPLETED", done=True), None) == "launch slurm logs 77"  # the run's folder is not known


@pytest.mark.parametrize(
    ("words", "following"),
    [
        (["parameters", "show", "tiny_bert"], ["train", "tiny_bert", "--out", "work/run", "--dry-run"]),
        (["parameters", "show", "optimizer.learning_rate"], ["parameters", "show", "bert_ja"]),
        (["plugins", "show", "adamw"], ["parameters", "show", "optimizer"]),
        (["plugins", "list"], ["plugins", "show", "bert"]),
        (
            ["launch", "slurm", "bert_base", "--out", "r", "--time", "1:00:00"],
            ["launch", "slurm", "bert_base", "--out", "r", "--time", "1:00:00", "--submit"],
        ),
    ],
)
def test_what_describes_names_what_uses_it(
    words: list[str], following: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(words)[0] == following
