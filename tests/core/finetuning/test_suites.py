"""Suites of tasks: files are found or named, and scores go into the model's folder and onto its card."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from labelled_examples import WORDS, classified, write
from transformers import AutoModel, AutoTokenizer

from terakoya import evaluate
from terakoya.commands.main import main
from terakoya.errors import UserError
from terakoya.finetuning.suites import bundled_suites, find_files, find_tasks, is_suite_task, read_suite
from terakoya.hub import card_evaluation

SUITE = """
name: Toys
url: https://example.com/toys
settings: {learning_rates: [1e-6, 1e-2], epochs: [2], batch_size: 8, seeds: 2, max_length: 64}
tasks:
  toy_labels:
    title: Toy labels
    task: classification
    files: {train: "toy*/train-v*.json", eval: "toy*/valid-v*.json", test: "toy*/test-v*.json"}
    columns: {text: sentence}
    scores: [accuracy]
    published:
      - {model: a person, set: eval, scores: {accuracy: 0.99}, source: paper}
  toy_likeness:
    title: Toy likeness
    task: similarity
    files: {eval: likeness.tsv}
    header: [text1, text2, label]
    scores: [spearman]
  toy_absent:
    title: Toy absent
    task: regression
    files: {train: absent/train.tsv, eval: absent/dev.tsv}
    scores: [pearson]
sources:
  paper: Somebody (2025), table 1
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    file = tmp_path / "toys.yaml"
    file.write_text(SUITE)
    return file


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, seed in (("train", 1), ("valid", 2), ("test", 3)):
        rows = [{"sentence": each["text"], "label": each["label"]} for each in classified(48, seed)]
        write(tmp_path / f"data/toy-v1/{name}-v1.json", rows)
    draw = random.Random(3)
    pairs = [[" ".join(draw.choices(WORDS, k=draw.randint(1, 6))) for _ in range(2)] for _ in range(20)]
    lines = [f"{one}\t{other}\t{len({*one.split()} & {*other.split()})}" for one, other in pairs]
    (tmp_path / "data/likeness.tsv").write_text("\n".join(lines))
    return tmp_path / "data"


def test_the_bundled_suites_are_whole() -> None:
    suites = bundled_suites()
    assert set(suites) == {"jglue", "glue"}
    assert {"jsts", "jnli", "jcommonsenseqa", "jsquad", "marc_ja", "jcola", "jsts_zero_shot"} == set(
        suites["jglue"].tasks
    )
    jsts = find_tasks(["jsts"])[0]
    assert jsts.settings({}).learning_rates == (5e-5, 3e-5, 2e-5) and jsts.settings({}).epochs == (3, 4)
    assert jsts.settings({"seeds": 2}).seeds == 2 and jsts.settings({}).max_length == 128
    assert find_tasks(["jcommonsenseqa"])[0].settings({}).batch_size == 64
    names = [each.name for each in find_tasks(["jnli", "jglue"])]
    assert names[0] == "jnli" and len(names) == 7
    assert is_suite_task("sst2") and is_suite_task("my.yaml") and not is_suite_task("lambada")
    for suite in suites.values():
        for task in suite.tasks.values():
            assert all(0 < score <= 1 for each in task.published for score in each.scores.values())
            assert all(set(each.scores) <= set(task.scores) for each in task.published)


@pytest.mark.slow
def test_a_suite_is_measured_and_its_scores_go_to_the_card(
    model: Path, suite: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    out = tmp_path / "scores.json"
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(folder), "--tasks", str(suite), "--data", str(data), "--epochs", "3", "--out", str(out)])
    assert ended.value.code == 0
    printed, told = capsys.readouterr()
    assert "Toy absent: expected absent/train.tsv and absent/dev.tsv" in told and "example.com/toys" in told
    content = json.loads(out.read_text())
    labels, likeness = content["finetuned"]["toy_labels"], content["finetuned"]["toy_likeness"]
    values = labels["scores"]["eval"]["accuracy"]["values"]
    assert len(values) == 2 and np.mean(values) > 0.7
    assert labels["scores"]["eval"]["accuracy"]["mean"] == pytest.approx(np.mean(values))
    assert labels["settings"]["learning_rate"] == 1e-2 and labels["settings"]["epochs"] == 3
    assert labels["settings"]["max_length"] == 24  # what the model takes
    assert set(content["skipped"]) == {"toy_absent"} and labels["examples"] == {"train": 48, "eval": 48, "test": 48}
    row = next(line for line in printed.splitlines() if "a person" in line)
    assert row.endswith("0.990") and "[1] Somebody (2025), table 1" in printed

    encoder, tokenizer = AutoModel.from_pretrained(model), AutoTokenizer.from_pretrained(model)

    def vector(text: str) -> np.ndarray:
        with torch.no_grad():
            mean: np.ndarray = encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy()
        return mean / np.linalg.norm(mean)

    rows = [line.split("\t") for line in (data / "likeness.tsv").read_text().splitlines()]
    cosines, gold = [float(vector(one) @ vector(other)) for one, other, _ in rows], [float(row[2]) for row in rows]
    assert likeness["scores"]["eval"]["pearson"]["mean"] == pytest.approx(np.corrcoef(cosines, gold)[0, 1], abs=1e-5)

    kept = folder / card_evaluation.SCORES
    assert json.loads(kept.read_text())["finetuned"] == content["finetuned"]
    assert json.loads(kept.read_text())["model"] == "model"  # no path of this machine
    found = {each.data: each for each in card_evaluation.read_evaluation(kept)}
    assert found["Toy labels"].origin == "fine-tuned, mean of 2 seeds"
    assert set(found["Toy labels"].values) == {"accuracy", "test accuracy"}
    half = labels["scores"]["eval"]["accuracy"]["interval"]
    assert found["Toy labels"].intervals["accuracy"] == half
    assert f"| accuracy | {np.mean(values):.4f} ± {half:.4f} |" in card_evaluation.table([found["Toy labels"]])
    assert found["Toy likeness"].origin == "without training"
    (entry, _) = card_evaluation.to_metadata([found["Toy labels"]], task="fill-mask")
    assert entry.metric_type == "accuracy" and entry.metric_value == pytest.approx(np.mean(values), abs=1e-6)


def test_a_limit_leaves_no_scores_behind(model: Path, suite: Path, data: Path, tmp_path: Path) -> None:
    found = evaluate(model, stores=[data], tasks=[str(suite)], limit=8, tuning={"seeds": 1, "epochs": [1]})
    assert found.finetuned["toy_labels"]["published"] == [] and found.finetuned["toy_labels"]["examples"]["train"] == 8
    assert not (model / card_evaluation.SCORES).exists()


def test_files_are_found_below_the_folder(suite: Path, data: Path, tmp_path: Path) -> None:
    (task, *_) = find_tasks([str(suite)])
    files = find_files(task, data)
    assert files["train"] == data / "toy-v1/train-v1.json" and find_files(task, tmp_path) == files
    (data / "toy-v1/test-v1.json").unlink()
    assert set(find_files(task, data)) == {"train", "eval"}
    (data / "toy-v1/valid-v2.json").write_text("{}")
    with pytest.raises(UserError, match=r"expected one file toy\*/valid-v\*.json, found 2: toy-v1/valid-v1.json"):
        find_files(task, data)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("task: similarity", "task: typo", 'task: unknown kind "typo"'),
        ("scores: [spearman]", "scores: [accuracy]", 'scores: similarity has no "accuracy"'),
        ("source: paper", "source: book", '"book" is not among the sources'),
        ("seeds: 2", "seed: 2", 'unknown key; did you mean "seeds"?'),
        (
            "files: {train: absent/train.tsv, eval: absent/dev.tsv}",
            "files: {eval: a}",
            "files: expected train and eval",
        ),
    ],
)
def test_mistakes_in_a_suite_file_are_named(suite: Path, old: str, new: str, message: str) -> None:
    suite.write_text(SUITE.replace(old, new))
    read_suite.cache_clear()
    with pytest.raises(UserError) as refused:
        find_tasks([str(suite)])
    assert message in str(refused.value) and str(suite) in str(refused.value)
    read_suite.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": ["jsts"]}, "expected one --data FOLDER"),
        ({"tasks": ["jsts", "lambada"], "stores": [Path()]}, "--tasks lambada: not together with suites"),
        ({"tasks": ["jsts"], "stores": [Path("nowhere")]}, "--data nowhere: expected the folder with the tasks' files"),
        ({"tasks": ["lambada"], "tuning": {"seeds": 2}}, "--seeds: is for --tasks of a suite"),
    ],
)
def test_what_does_not_go_together_is_refused(model: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(model, **arguments)


def test_without_any_file_nothing_is_loaded(suite: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"Toy labels: expected toy\*/train-v\*.json and toy\*/valid-v\*.json"):
        evaluate(tmp_path / "no model", tasks=[str(suite)], stores=[tmp_path / "empty"])
