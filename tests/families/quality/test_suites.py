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
import yaml
from command_line import call
from labelled_examples import WORDS, classified, write
from transformers import AutoModel, AutoTokenizer, ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from terakoya import evaluate
from terakoya.errors import UserError
from terakoya.toolkit.formats.model_files import SCORES
from terakoya_evaluation.options import Precision
from terakoya_hub.scores import read_evaluation
from terakoya_quality.commands.training_scores import show_benchmark
from terakoya_quality.evaluation import suites as measured_suites
from terakoya_quality.finetuning.entities import NamedEntities
from terakoya_quality.finetuning.suites import bundled_suites, find_files, find_tasks, is_suite_task, read_suite

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
    assert set(suites) == {"jglue", "glue", "ner_ja"}
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


def test_a_suite_is_measured_and_its_scores_are_kept_for_the_card(
    model: Path, suite: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    out = tmp_path / "scores.json"
    chosen = ["--epochs", 3, "--optimizer", "muon", "--schedule", "cosine", "--out", out]
    code, printed, told = call(capsys, "evaluate", folder, "--tasks", suite, "--data", data, *chosen)
    assert code == 0
    assert "Toy absent: expected absent/train.tsv and absent/dev.tsv" in told and "example.com/toys" in told
    assert "toy-v1/train-v1.json: 2 labels, and how many examples have them: bad (24), good (24)" in told
    assert "test: 2 of 48 examples are among" in told and "eval: " not in told  # by chance, two texts are alike
    content = json.loads(out.read_text())
    labels, likeness = content["finetuned"]["toy_labels"], content["finetuned"]["toy_likeness"]
    values = labels["scores"]["eval"]["accuracy"]["values"]
    assert len(values) == 2 and np.mean(values) > 0.7
    assert labels["scores"]["eval"]["accuracy"]["mean"] == pytest.approx(np.mean(values))
    assert labels["settings"]["learning_rate"] == 1e-2 and labels["settings"]["epochs"] == 3
    assert labels["settings"]["max_length"] == 24  # what the model takes
    assert labels["settings"]["optimizer"] == {"type": "muon"} and "optimizer muon, schedule cosine," in printed
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

    assert told.splitlines()[-1].startswith("next: terakoya upload") and "--evaluation" not in told
    kept = folder / SCORES
    assert json.loads(kept.read_text())["finetuned"] == content["finetuned"]
    assert json.loads(kept.read_text())["model"] == "model"  # no path of this machine
    found = {each.data: each for each in read_evaluation(kept)}
    assert found["Toy labels"].origin == "fine-tuned, mean of 2 seeds"
    assert set(found["Toy labels"].values) == {"accuracy", "test accuracy"}
    assert found["Toy labels"].values["accuracy"] == pytest.approx(np.mean(values))
    half = labels["scores"]["eval"]["accuracy"]["interval"]
    assert found["Toy labels"].intervals["accuracy"] == half
    assert found["Toy likeness"].origin == "without training"


def test_a_limit_leaves_no_scores_behind_and_is_told_with_each_score(
    model: Path, suite: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = tmp_path / "scores.json", Path(shutil.copytree(model, tmp_path / "model"))
    words = ["--tasks", suite, "--data", data, "--limit", 8, "--length", 12, "--seeds", 1, "--epochs", 1, "--out", out]
    code, _, told = call(capsys, "evaluate", folder, *words)
    assert code == 0 and f"--evaluation {out}" in told
    found = json.loads(out.read_text())["finetuned"]
    assert found["toy_labels"]["settings"]["max_length"] == 12
    assert found["toy_labels"]["published"] == [] and found["toy_labels"]["examples"]["train"] == 8
    assert not (folder / SCORES).exists()
    results = read_evaluation(out)
    assert [each.origin for each in results] == [
        "fine-tuned, mean of 1 seed, of the first 8 examples alone", "without training, of the first 8 examples alone"
    ]  # fmt: skip
    assert all(each.settings["limit"] == 8 for each in results)


def test_the_scores_of_an_electra_are_kept_beside_its_discriminator(model: Path, data: Path, tmp_path: Path) -> None:
    config = ElectraConfig(
        vocab_size=15, embedding_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=8, max_position_embeddings=24,
    )  # fmt: skip
    folder = tmp_path / "electra"
    for name, kind in (("generator", ElectraForMaskedLM), ("discriminator", ElectraForPreTraining)):
        kind(config).save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder / name)
    found = evaluate(folder, stores=[data], tasks=[str(likeness_suite(tmp_path))])
    kept = json.loads((folder / "discriminator" / SCORES).read_text())
    assert kept["finetuned"] == found.finetuned and kept["model"] == "electra"


def likeness_suite(folder: Path) -> Path:
    """A suite with the task of similarity alone."""
    file = folder / "likeness.yaml"
    settings = yaml.safe_load(SUITE)
    settings["tasks"] = {"toy_likeness": settings["tasks"]["toy_likeness"]}
    file.write_text(yaml.safe_dump(settings))
    return file


def test_a_task_that_is_refused_leaves_the_scores_of_the_others(
    model: Path, suite: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before it are in the model's folder already, and those after it are measured."""
    folder = Path(shutil.copytree(model, tmp_path / "model", ignore=lambda *_: [SCORES]))
    content = yaml.safe_load(SUITE)
    first, last = content["tasks"]["toy_labels"], content["tasks"]["toy_likeness"]
    refused = {**first, "title": "Refused"}
    content["tasks"] = {"toy_labels": first, "toy_refused": refused, "toy_likeness": last}
    suite.write_text(yaml.safe_dump(content, sort_keys=False))
    read_suite.cache_clear()
    kept: list[set[str]] = []

    def search(*arguments: Any, **settings: Any) -> Any:
        if (folder / SCORES).exists():
            kept.append(set(json.loads((folder / SCORES).read_text())["finetuned"]))
            raise UserError("no head for it")
        return real(*arguments, **settings)

    real = measured_suites.search
    monkeypatch.setattr(measured_suites, "search", search)
    found = evaluate(folder, stores=[data], tasks=[str(suite)], tuning={"seeds": 1, "epochs": [1]})
    assert kept == [{"toy_labels"}] and found.skipped == {"toy_refused": "Refused: no head for it"}
    assert set(found.finetuned) == {"toy_labels", "toy_likeness"}
    read_suite.cache_clear()


def test_a_task_of_similarity_is_measured_in_the_precision_asked_for(model: Path, data: Path, tmp_path: Path) -> None:
    suite = likeness_suite(tmp_path)
    scores = {}
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    for precision in precisions:
        found = evaluate(model, stores=[data], tasks=[str(suite)], limit=40, precision=precision)
        scores[precision] = found.finetuned["toy_likeness"]["scores"]["eval"]["pearson"]["mean"]
    assert scores["fp32"] != scores["bf16"] == pytest.approx(scores["fp32"], abs=0.05)


def test_files_are_found_below_the_folder(suite: Path, data: Path, tmp_path: Path) -> None:
    (task, *_) = find_tasks([str(suite)])
    files = find_files(task, data)
    assert files.paths["train"] == data / "toy-v1/train-v1.json" and find_files(task, tmp_path) == files
    (data / "toy-v1/test-v1.json").unlink()
    assert set(find_files(task, data).paths) == {"train", "eval"}
    (data / "toy-v1/valid-v2.json").write_text("{}")
    with pytest.raises(UserError, match=r"expected one file toy\*/valid-v\*.json, found 2: toy-v1/valid-v1.json"):
        find_files(task, data)


def write_glue(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Writes QQP and RTE as a data set of the Hub has them; returns the rows of QQP by set."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = {
        name: [{"question1": f"{name} {n}?", "question2": "is it?", "label": n % 2, "idx": n} for n in range(4)]
        for name in ("train", "validation", "test")
    }
    for task, columns in (("qqp", {}), ("rte", {"question1": "sentence1", "question2": "sentence2"})):
        (folder / task).mkdir(parents=True)
        for name, each in rows.items():
            renamed = [{columns.get(key, key): value for key, value in row.items()} for row in each]
            parquet.write_table(pyarrow.Table.from_pylist(renamed), folder / task / f"{name}-00000-of-00001.parquet")
    return rows


def test_glue_is_read_from_its_own_files_and_from_those_of_the_hub(tmp_path: Path) -> None:
    rows = write_glue(tmp_path / "hub")
    qqp, rte = find_tasks(["qqp", "rte"])
    read = find_files(qqp, tmp_path / "hub").read(None)
    assert [row.text("text1") for row in read["train"]] == [each["question1"] for each in rows["train"]]
    assert set(read) == {"train", "eval"} and [row.value("label") for row in read["eval"]] == [0, 1, 0, 1]
    assert find_files(rte, tmp_path / "hub").read(2)["eval"][1].text("text2") == "is it?"
    (tmp_path / "own/RTE").mkdir(parents=True)
    for name in ("train", "dev"):
        (tmp_path / f"own/RTE/{name}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tentailment\n")
    assert find_files(rte, tmp_path / "own").read(None)["train"][0].text("text1") == "A."
    with pytest.raises(UserError, match=r"RTE: expected RTE/train.tsv and RTE/dev.tsv, or rte/\*train\*.parquet and"):
        find_files(rte, tmp_path / "own/RTE")


@pytest.mark.parametrize(
    ("tasks", "words", "optimizer", "rate", "told"),
    [
        ("rte", (), "muon", 5e-3, "a rate of 5e-05, which is for larger models: muon with 0.005 is taken"),
        ("rte", ("--learning-rate", 4e-5), "adamw", 4e-5, "such a small model needs about --optimizer"),
        ("own.yaml", (), "adamw", 5e-5, "such a small model needs about --optimizer"),
    ],
)
def test_a_small_model_gets_rates_of_its_size_where_a_benchmark_has_those_of_large_ones(
    tasks: str, words: tuple[Any, ...], optimizer: str, rate: float, told: str,
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write_glue(tmp_path / "hub")
    monkeypatch.chdir(tmp_path)
    rte = {"title": "RTE", "task": "classification", "scores": ["accuracy"]}
    rte |= {"files": {"train": "rte/train*.parquet", "eval": "rte/validation*.parquet"}}
    rte |= {"columns": {"text1": "sentence1", "text2": "sentence2"}}
    own = {"name": "Own", "url": "", "settings": {"learning_rates": [5e-5]}, "tasks": {"mine": rte}}
    Path("own.yaml").write_text(json.dumps(own), encoding="utf-8")
    short = ("--data", "hub", "--epochs", 1, "--seeds", 1, "--out", "scores.json", "--limit", 2)
    code, _, lines = call(capsys, "evaluate", model, "--tasks", tasks, *short, *words)
    (task,) = json.loads(Path("scores.json").read_text(encoding="utf-8"))["finetuned"].values()
    assert code == 0 and told in " ".join(lines.split())
    assert task["settings"]["optimizer"]["type"] == optimizer and task["settings"]["learning_rate"] == rate


def test_data_may_be_a_data_set_in_the_cache_of_the_hub(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    asked: dict[str, Any] = {"tasks": ["qqp"], "stores": [Path("some-lab/glue")], "limit": 3}
    with pytest.raises(UserError, match=r"fetch it first: hf download some-lab/glue --repo-type dataset"):
        evaluate(model, **asked)
    kept = tmp_path / "hub/datasets--some-lab--glue"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs/main").write_text("0" * 40)
    write_glue(kept / "snapshots" / ("0" * 40))
    found = evaluate(model, **asked, tuning={"seeds": 1, "epochs": [1]})
    assert found.finetuned["qqp"]["examples"] == {"train": 3, "eval": 3}


def test_a_file_with_all_examples_is_divided_by_its_examples_alone(tmp_path: Path) -> None:
    def entry(number: int) -> dict[str, Any]:
        return {"curid": str(number), "text": f"{number}時に東京駅", "entities": [
            {"name": "東京駅", "span": [len(str(number)) + 2, len(str(number)) + 5], "type": "施設名"}]}  # fmt: skip

    entries = [entry(number) for number in range(400)]
    (task,) = find_tasks(["ner_wikipedia"])
    (tmp_path / "ner.json").write_text(json.dumps(entries, ensure_ascii=False))
    sets = find_files(task, tmp_path).read(None)
    assert sum(map(len, sets.values())) == 400 and 300 < len(sets["train"]) < 340 and 25 < len(sets["test"]) < 55
    kind = NamedEntities(sets["train"])
    assert kind.labels == ["O", "B-施設名", "I-施設名"]
    first = sets["eval"][0]
    assert {first.text("text")[start:end] for _, start, end in kind.read([first])[0].spans} == {"東京駅"}
    (tmp_path / "ner.json").write_text(json.dumps(entries[200:], ensure_ascii=False))
    fewer = find_files(task, tmp_path).read(None)
    later = {row.value("curid") for row in sets["eval"] if int(row.text("curid")) >= 200}
    assert {row.value("curid") for row in fewer["eval"]} == later
    assert len(find_files(task, tmp_path).read(5)["train"]) == 5
    (tmp_path / "ner.json").write_text(json.dumps(entries[:1], ensure_ascii=False))
    with pytest.raises(UserError, match=r"ner.json: expected examples for \w+, found too few to divide"):
        find_files(task, tmp_path).read(None)


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
        (
            "files: {train: absent/train.tsv, eval: absent/dev.tsv}",
            "files: {all: a.tsv}",
            "files: expected a file for each set, or one file `all` and `shares` of the sets",
        ),
        (
            "files: {train: absent/train.tsv, eval: absent/dev.tsv}",
            "files: {all: a.tsv}\n    shares: {train: 0.5, eval: 0.4}",
            "shares: expected numbers above 0 that add up to 1",
        ),
        (
            "files: {train: absent/train.tsv, eval: absent/dev.tsv}",
            "files: {train: a, eval: b}\n    layouts: [{files: {train: a}}]",
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
        ({"tasks": ["jglue", "snli"], "stores": [Path()]}, 'second command; did you mean "wnli" or "qnli"'),
        ({"tasks": ["jsts"], "stores": [Path("nowhere")]}, "--data nowhere: expected the folder with the tasks' files"),
        ({"tasks": ["jsts"], "stores": [Path()], "stride": 8}, "--stride: is for perplexity"),
        ({"tasks": ["jsts"], "stores": [Path()], "length": 5}, "--length 5: expected 8 or more"),
        ({"tasks": ["jmteb"], "stride": 8}, "--stride: not for tasks of jmteb"),
        ({"tasks": ["lambada"], "length": 64}, "--length: is not for tasks of lm-eval"),
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


def test_a_score_that_the_labels_do_not_have_is_an_empty_cell(capsys: pytest.CaptureFixture[str]) -> None:
    """Three labels have no F1 of the second of two."""
    scores = {"eval": {"accuracy": {"mean": 0.5, "interval": None, "values": [0.5]}}}
    result = {"title": "Mine", "suite": "Mine", "settings": {}, "scores": scores, "shown": ["accuracy", "f1"]}
    show_benchmark({**result, "examples": {"eval": 4}, "limit": None, "published": []})
    assert capsys.readouterr().out.splitlines()[-1].split()[-2:] == ["0.5000", "-"]
