"""Tasks of mteb: how they are named, refused, skipped, shown and kept; and their scores, where mteb is installed."""

from __future__ import annotations

import json
import random
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command_line import call
from huggingface_hub import constants
from huggingface_hub.repocard import metadata_load, metadata_save
from labelled_examples import WORDS
from transformers import AutoModel, AutoTokenizer

from terakoya import evaluate
from terakoya.errors import UserError
from terakoya.toolkit.formats.model_files import SCORES
from terakoya_hub.scores import read_evaluation
from terakoya_quality.commands.training_scores import show_embedding
from terakoya_quality.evaluation.embedding import is_embedding_task, mean_of_tasks
from terakoya_quality.evaluation.embedding_data import _with_own_languages
from terakoya_quality.finetuning.metrics import spearman
from terakoya_quality.finetuning.scores import write_scores

JSTS = ("mteb/JSTS", "5bac629e25799df4c9c80a6a5db983d6cba9e77d")
REVIEWS = ("mteb/AmazonReviewsClassification", "6b5d328eaae8ef408dd7d775040245cf86f92e9d")
"""Names and revisions that mteb asks for. The examples in these tests are other ones."""


def result(kind: str, **sets: float) -> dict[str, Any]:
    """The result of a task, in the form of `measure_embedding`'s."""
    scores = {name: {"accuracy": {"mean": value, "interval": None, "values": [value]}} for name, value in sets.items()}
    return {
        "title": f"JMTEB(v2): {kind} of toys", "suite": "JMTEB(v2)", "task": kind, "scores": scores,
        "settings": {"max_length": 64, "pooling": "mean", "mteb": "2"}, "origin": "vectors of texts, by mteb",
        "shown": ["accuracy"], "cut": {"all": 1234},
    }  # fmt: skip


def test_benchmarks_and_their_tasks_are_told_from_other_tasks() -> None:
    assert all(map(is_embedding_task, ("jmteb", "jmteb_lite", "jmteb:JSTS")))
    assert not any(map(is_embedding_task, ("jsts", "jglue", "lambada", "mteb.yaml")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": ["jmteb:JSTS", "jsts"]}, "--tasks jsts: not together with jmteb"),
        ({"tasks": ["jmteb"], "limit": 5}, "--limit: not for tasks of jmteb"),
        ({"tasks": ["jmteb"], "stores": [Path()]}, "--data: not for tasks of jmteb"),
        ({"tasks": ["jmteb"], "tuning": {"learning_rates": [1e-5], "batch_size": 4}}, "--learning-rate: not for tasks"),
        ({"tasks": ["jmteb"]}, r'mteb is not installed; .*: pip install "terakoya\[mteb\]"'),
    ],
)
def test_what_does_not_go_together_is_refused_before_a_model_is_loaded(
    tmp_path: Path, arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terakoya_quality.evaluation.embedding.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path / "no model", **arguments)


def test_the_mean_of_a_benchmark_is_that_of_tasks_and_of_kinds() -> None:
    results = {
        "jmteb:A": result("STS", test=0.5), "jmteb:B": result("Retrieval", validation=0.2, test=0.4),
        "jmteb:C": result("Retrieval", test=0.7), "jmteb_lite:D": result("STS", test=0.0),
    }  # fmt: skip
    found = mean_of_tasks("jmteb", results)
    means = {name: each["mean"] for name, each in found["scores"]["eval"].items()}
    assert found["title"] == "JMTEB(v2): all 3 tasks" and found["shown"] == list(means)
    assert means == pytest.approx(
        {"mean_of_tasks": 1.5 / 3, "mean_of_kinds": 0.5, "mean_of_sts": 0.5, "mean_of_retrieval": 0.5}
    )
    results["jmteb:C"] = result("Retrieval", test=0.9)
    means = {name: each["mean"] for name, each in mean_of_tasks("jmteb", results)["scores"]["eval"].items()}
    assert means == pytest.approx(
        {"mean_of_tasks": 1.7 / 3, "mean_of_kinds": 0.55, "mean_of_sts": 0.5, "mean_of_retrieval": 0.6}
    )


def test_scores_are_one_table_and_kept_for_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = {"jmteb:A": result("STS", validation=0.25, test=0.5)}
    results["jmteb"] = mean_of_tasks("jmteb", results)
    show_embedding(results)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "JMTEB(v2): max length 64, pooling mean, mteb 2",
        "task examples score value cut",
        "STS of toys validation accuracy 0.2500 1,234",
        "STS of toys test accuracy 0.5000 1,234",
        "all 1 tasks mean of tasks 0.3750 0",
        "all 1 tasks mean of kinds 0.3750 0",
        "all 1 tasks mean of sts 0.3750 0",
    ]
    write_scores(tmp_path, tmp_path, results, settings={})
    toys, mean = read_evaluation(tmp_path / SCORES)
    assert toys.data == "JMTEB(v2): STS of toys" and toys.values == {"validation accuracy": 0.25, "test accuracy": 0.5}
    assert mean.data == "JMTEB(v2): all 1 tasks" and mean.values["mean_of_tasks"] == 0.375
    assert toys.origin == mean.origin == "vectors of texts, by mteb"
    assert toys.settings == mean.settings == {"max_length": 64, "pooling": "mean", "mteb": "2"}


def test_data_are_listed_in_the_languages_of_the_task_alone(tmp_path: Path) -> None:
    """The task has the attributes of mteb's that are read, and nothing else of it."""
    snapshot = tmp_path / "snapshot"
    (snapshot / "ja-corpus").mkdir(parents=True)
    (snapshot / "ja-corpus/test.txt").write_text("a")
    names = ["ar-corpus", "ja-corpus", "ja-qrels", "default", "en", "zh-CN", "english"]
    metadata_save(snapshot / "README.md", {"configs": [{"config_name": name} for name in names], "license": "mit"})
    about = SimpleNamespace(is_multilingual=True, eval_langs={"ar": [], "ja": [], "en": [], "zh-CN": []})
    folder = _with_own_languages(SimpleNamespace(metadata=about, hf_subsets=["ja"]), snapshot, tmp_path / "links")
    listed = metadata_load(folder / "README.md")
    assert listed is not None and listed["license"] == "mit"
    assert [each["config_name"] for each in listed["configs"]] == ["ja-corpus", "ja-qrels", "default", "english"]
    assert (folder / "ja-corpus/test.txt").read_text() == "a" and folder != snapshot
    about.is_multilingual = False
    assert _with_own_languages(SimpleNamespace(metadata=about, hf_subsets=["ja"]), snapshot, folder) == snapshot


def write_data(cache: Path, name: str, revision: str, configs: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
    """Writes sets of rows as a data set in the Hub's cache: configuration -> set -> rows; empty ones have no file."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = cache / f"datasets--{name.replace('/', '--')}" / "snapshots" / revision
    listed = []
    for config, sets in configs.items():
        files = [{"split": each, "path": f"{config}/{each}.parquet"} for each in sets]
        listed.append({"config_name": config, "data_files": files})
        (folder / config).mkdir(parents=True, exist_ok=True)
        for each, rows in sets.items():
            if rows:
                parquet.write_table(pyarrow.Table.from_pylist(list(rows)), folder / config / f"{each}.parquet")
    metadata_save(folder / "README.md", {"configs": listed})


@pytest.mark.filterwarnings("ignore")
def test_mteb_measures_the_means_of_the_last_hidden_states(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mteb")
    import datasets

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    asked: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: asked.append(address))
    draw = random.Random(3)
    pairs = [[" ".join(draw.choices(WORDS, k=draw.randint(1, 6))) for _ in range(2)] for _ in range(40)]
    pairs.append([" ".join(WORDS * 4), "kami"])
    rows = [{"sentence1": a, "sentence2": b, "score": float(len({*a.split()} & {*b.split()}))} for a, b in pairs]
    write_data(tmp_path / "hub", *JSTS, {"default": {"validation": rows}})
    reviews = [{"text": pair[0], "label": int("ton" in pair[0])} for pair in pairs]
    sets = {name: reviews[first::3] for first, name in enumerate(("train", "validation", "test"))}
    write_data(tmp_path / "hub", *REVIEWS, {"de": dict.fromkeys(sets, ()), "ja": sets})
    folder, out = Path(shutil.copytree(model, tmp_path / "model")), tmp_path / "scores.json"
    tasks = "jmteb:JSTS,jmteb:AmazonReviewsClassification,jmteb:JSICK"
    code, printed, told = call(capsys, "evaluate", folder, "--tasks", tasks, "--device", "cpu", "--out", out)
    assert code == 0
    assert "skipped: jmteb:JSICK: the data are not in the cache of the Hugging Face Hub" in told
    assert "mteb.get_tasks(tasks=['JSICK'], languages=['jpn'])" in told

    encoder, tokenizer = AutoModel.from_pretrained(model), AutoTokenizer.from_pretrained(model)

    def vector(text: str) -> np.ndarray:
        with torch.no_grad():
            inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=24)
            mean: np.ndarray = encoder(**inputs).last_hidden_state[0].mean(0).numpy()
        return mean / np.linalg.norm(mean)

    expected = spearman(
        np.array([float(vector(one) @ vector(other)) for one, other in pairs]), np.array([row["score"] for row in rows])
    )
    content = json.loads(out.read_text())
    jsts, amazon = content["finetuned"]["jmteb:JSTS"], content["finetuned"]["jmteb:AmazonReviewsClassification"]
    assert jsts["scores"]["validation"]["cosine_spearman"]["mean"] == pytest.approx(expected, abs=1e-6)
    assert f"{expected:.4f}" in next(line for line in printed.splitlines() if line.startswith("JSTS"))
    assert jsts["texts"] == 82 and jsts["cut"] == {"all": 1} and jsts["settings"]["max_length"] == 24
    assert set(amazon["scores"]) == {"validation", "test"} and amazon["data"]["languages"] == ["ja"]
    assert content["measure"] == "embedding" and set(content["skipped"]) == {"jmteb:JSICK"}
    kept = folder / SCORES
    assert json.loads(kept.read_text())["finetuned"] == content["finetuned"]
    assert "JMTEB(v2): JSTS" in {each.data for each in read_evaluation(kept)}

    assert not asked and not (tmp_path / "datasets").exists() and not constants.HF_HUB_OFFLINE
    with pytest.raises(UserError, match=r"jmteb:JSICK: the data are not in the cache .*; fetch them first: python -c"):
        evaluate(folder, tasks=["jmteb:JSICK"])
    monkeypatch.setattr("terakoya_quality.finetuning.similarity.TextVectors.vectors", lambda self, texts, **how: 1 / 0)
    with pytest.raises(UserError, match="jmteb:JSTS: mteb cannot measure it: division by zero"):
        evaluate(folder, tasks=["jmteb:JSTS"])
    with pytest.raises(UserError, match=r'--tasks jmteb:JSTZ: JMTEB\(v2\) has no such task; did you mean "JSTS"'):
        evaluate(folder, tasks=["jmteb:JSTZ"])
    next((tmp_path / "hub").rglob("validation.parquet")).unlink()
    for file in (tmp_path / "hub").rglob("*.parquet"):
        file.write_bytes(b"half a file")
    with pytest.raises(UserError, match=r"mteb cannot read it: .* fetch it again: python -c"):
        evaluate(folder, tasks=["jmteb:JSTS", "jmteb:AmazonReviewsClassification"])
