"""The leaderboard at toy size: its text and tests out of repositories, a row out of a command, the page."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from labelled_examples import WORDS
from transformers import AutoModel, AutoTokenizer

from terakoya.json_settings import read_settings

TOOLS = Path(__file__).resolve().parents[2] / "tools"
NOVEL = """題名
作者

-------------------------------------------------------
【テキスト中に現れる記号について】
《》：ルビ
-------------------------------------------------------

　麁※［＃「けものへん＋廣」、第4水準2-80-55］《そこう》な男が五階｜立《だて》の家に住む。
［＃ここから２字下げ］これは%sという話である。

底本：「全集」
"""
ARTICLE = "<art><tit><j>%s</j></tit><par><sen><j>町の</j><e>x</e></sen><sen><j>話。</j></sen></par></art>"
COMMAND = "import os, labelled_examples as e; from pathlib import Path; e.make_model(Path(os.environ['OUT']))"


@pytest.fixture
def leaderboard(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS / "leaderboard"))
    import leaderboard

    return leaderboard


def commit(folder: Path, files: dict[str, bytes]) -> str:
    """Makes a repository of `files` and returns its commit."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def test_the_text_is_made_of_its_repositories(
    leaderboard: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed_text = leaderboard.fixed_text
    asked = "この文は試験の中にもあるので本文からは除かれる"
    novels = {
        "cards/1/files/new.txt": NOVEL % ("長い文章" * 60),
        "cards/1/files/again.txt": NOVEL % ("長い文章" * 60),
        "cards/2/files/old.txt": NOVEL % ("ゐる" * 200),
        "cards/3/files/tested.txt": NOVEL % ("短い文章" * 60 + f"。{asked}。"),
        "README.md": "no text",
    }
    rows = [{"yjcaptions_id": f"{number // 5}-1-{number}", "sentence1": asked, "sentence2": "b", "label": 1.0}
            for number in range(60)]  # fmt: skip
    jglue = {f"datasets/{task}-v1.3/{name}-v1.3.json": lines(rows)
             for task in ("jsts", "jnli", "jcommonsenseqa") for name in ("train", "valid", "test")}  # fmt: skip
    sentence = "# text = 京都へ\n1\t京都\t_\t_\t名詞-固有名詞-地名-一般\t_\n2\tへ\t_\t_\t助詞-格助詞\t_\n\n"
    for name, files in {
        "AOZORA": {name: text.replace("\n", "\r\n").encode("cp932") for name, text in novels.items()},
        "KYOTO": {"wiki_corpus_2.01/A/1.xml": (ARTICLE % ("町" * 200)).encode(), "wiki_corpus_2.01/A/2.xml": b"<art>"},
        "JGLUE": jglue,
        "GSD": {f"ja_gsd-ud-{name}.conllu": sentence.encode() * 10 for name in ("dev", "test")},
    }.items():
        there = getattr(fixed_text, name).name
        monkeypatch.setattr(fixed_text, name, fixed_text.Repository(there, commit(tmp_path / "sources" / there, files)))
    command = ["text", str(tmp_path / "sources"), "--work", str(tmp_path / "work")]
    assert leaderboard.main(command) == 1  # not the text of the rows
    monkeypatch.setattr(fixed_text, "TEXT_SHA256", capsys.readouterr().out.split()[-1])
    assert leaderboard.main(command) == 0
    made = (tmp_path / "work/text.jsonl").read_text(encoding="utf-8").splitlines()
    assert sorted(json.loads(line)["text"] for line in made) == sorted(
        [f"麁獷な男が五階立の家に住む。\nこれは{'長い文章' * 60}という話である。", f"{'町' * 200}\n町の話。"]
    )
    data = tmp_path / "work/data"
    counts = {path.relative_to(data).as_posix(): len(path.read_bytes().splitlines()) for path in data.rglob("*.jsonl")}
    assert len(counts) == 12
    images = {}
    for name in ("train", "eval"):
        examples = (data / f"jnli/{name}.jsonl").read_text(encoding="utf-8").splitlines()
        images[name] = {json.loads(line)["yjcaptions_id"][:2] for line in examples}
    assert counts["jnli/train.jsonl"] + counts["jnli/eval.jsonl"] == 60 and images["train"] and images["eval"]
    assert not images["train"] & images["eval"]
    example = json.loads((data / "names/test.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert example == {"text": "京都へ", "spans": [{"start": 0, "end": 2, "label": "LOC"}]}


def test_a_command_makes_a_row_unless_it_takes_too_long(
    leaderboard: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forks: None
) -> None:
    for task in leaderboard.TASKS:
        for seed, name in enumerate(("train", "eval", "test")):
            draw = random.Random(f"{task} {seed}")
            words = [draw.choices(WORDS, k=3) for _ in range(12)]
            rows: list[dict[str, Any]] = {
                "jsts": [{"sentence1": " ".join(each), "sentence2": each[0], "label": float(len(set(each)))}
                         for each in words],
                "jnli": [{"sentence1": " ".join(each), "sentence2": each[0], "label": "ab"[number % 2]}
                         for number, each in enumerate(words)],
                "jcommonsenseqa": [{"question": each[0], "choice0": each[1], "choice1": each[2], "label": number % 2}
                                   for number, each in enumerate(words)],
                "names": [{"text": " ".join(each), "spans": [{"start": 0, "end": len(each[0]), "label": "PER"}]}
                          for each in words],
            }[task]  # fmt: skip
            (tmp_path / "data" / task).mkdir(parents=True, exist_ok=True)
            (tmp_path / "data" / task / f"{name}.jsonl").write_bytes(lines(rows))
    (tmp_path / "text.jsonl").touch()
    monkeypatch.setattr(leaderboard, "ROWS", tmp_path / "rows")
    monkeypatch.setattr(leaderboard, "SEEDS", 2)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1] / "helpers"))
    command = ["enter", "A toy", "--work", str(tmp_path), "--", leaderboard.sys.executable, "-c", COMMAND]
    monkeypatch.setitem(leaderboard.BUDGETS, "core-20min", -1)
    assert leaderboard.main(command) == 1
    monkeypatch.setitem(leaderboard.BUDGETS, "core-20min", 600)
    assert leaderboard.main(command) == 0
    path = tmp_path / "rows/core-20min-a-toy.json"
    row = json.loads(path.read_text(encoding="utf-8"))
    assert [set(row["models"][seed]["scores"]) for seed in "12"] == [set(leaderboard.TASKS)] * 2
    for task, rate in row["models"]["1"]["rates"].items():
        asked = yaml.safe_load((tmp_path / f"core-20min-a-toy/2/{task}.yaml").read_text(encoding="utf-8"))["tasks"]
        assert list(asked) == [task] and asked[task]["settings"]["learning_rates"] == [rate]
    assert leaderboard.table().splitlines()[-1].startswith("| core-20min | A toy | 0.0 M | ")
    better = {task: score + 0.5 for task, score in row["models"]["1"]["scores"].items()}
    for budget, name in (("core-2h", "Longer"), ("core-20min", "Better")):
        other = row | {
            "budget": budget,
            "name": name,
            "models": dict.fromkeys("12", row["models"]["1"] | {"scores": better}),
        }
        path.with_name(f"{name}.json").write_text(json.dumps(other), encoding="utf-8")
    assert [line.split(" | ")[1] for line in leaderboard.table().splitlines()[2:]] == ["Better", "A toy", "Longer"]
    path.with_name("Longer.json").unlink()
    path.with_name("Better.json").unlink()
    del row["models"]["2"]
    path.write_text(json.dumps(row), encoding="utf-8")
    assert len(leaderboard.table().splitlines()) == 2  # not whole
    shutil.rmtree(tmp_path / "core-20min-a-toy/1")  # as on another machine: the row has what the first model chose
    kept, again = tmp_path / "core-20min-a-toy/2/jsts.json", tmp_path / "core-20min-a-toy/2/names.json"
    written = kept.stat().st_mtime_ns
    again.unlink()  # as if it had been stopped there
    assert leaderboard.main(command) == 0 and not (tmp_path / "core-20min-a-toy/1").exists()
    assert again.exists() and kept.stat().st_mtime_ns == written
    row = json.loads(path.read_text(encoding="utf-8"))
    assert row["models"].keys() == {"1", "2"}
    path.write_text(json.dumps(row | {"processor": "a faster one"}), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"begun on a faster one, this is .*: not one row"):
        leaderboard.main(command)


@pytest.mark.parametrize("trainer", [pytest.param("ours", marks=pytest.mark.nightly), "train"])
def test_the_first_rows_are_one_architecture_over_one_tokenizer(
    trainer: str, leaderboard: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forks: None
) -> None:
    import first_rows

    run, commands = subprocess.run, list[list[str]]()

    def shortened(command: list[str], **settings: Any) -> None:
        commands.append(command)
        if command[3] == "init":
            run([*command, "--no-measure"], **settings)
            pipeline = read_settings(tmp_path / "pipeline.json")
            pipeline["parameters"] |= {"max_steps": 2, "schedule": {"type": "constant"}}
            first_rows.write("pipeline.json", pipeline)
        else:
            run(command, **settings)

    text = (resources.files("terakoya.corpus") / "demo_town.txt").read_text(encoding="utf-8").split("\n\n")[:60]
    (tmp_path / "text.jsonl").write_bytes(lines([{"text": each} for each in text]))
    monkeypatch.chdir(tmp_path)
    for name, value in {"TEXT": "text.jsonl", "OUT": "model", "SEED": "3", "SECONDS": "400"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(first_rows, "MARGIN", 4e-4)
    monkeypatch.setattr(first_rows, "PREPARATION", -1e5)  # 0.01 hours for `init`, and not a second for `Trainer`
    monkeypatch.setattr(first_rows.subprocess, "run", shortened)
    first_rows.main(trainer)
    model = AutoModel.from_pretrained("model", local_files_only=True, trust_remote_code=False)
    parameters = read_settings(tmp_path / "pipeline.json")["parameters"]
    if trainer == "train":
        parameters = read_settings(tmp_path / "parameters.json")
    assert model.config.hidden_size == parameters["architecture"]["hidden_size"] and parameters["seed"] == 3
    tokenizer = AutoTokenizer.from_pretrained("model", local_files_only=True, trust_remote_code=False)
    assert model.config.vocab_size >= len(tokenizer) > 100
    assert (Path("work/run").exists(), "showcase.py" in commands[-1][1]) == (trainer == "ours", trainer == "train")


def test_the_page_has_the_rows(leaderboard: ModuleType) -> None:
    assert leaderboard.table() in leaderboard.PAGE.read_text(encoding="utf-8")
