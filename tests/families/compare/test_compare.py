"""Comparisons of runs, models and recipes, against numbers that are computed another way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from command_line import call
from labelled_examples import WORDS, classified, make_model, write
from safetensors.torch import load_file, save_file
from small_preparation import prepare_corpus
from transformers import AutoModelForMaskedLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from terakoya import evaluate, train
from terakoya.config.parameters import Parameters
from terakoya.corpus.corpus import Corpus
from terakoya.errors import Stopped, UserError
from terakoya.plugins import registry
from terakoya.rows.stores import validation_rows
from terakoya.store.token_store import open_store
from terakoya.training.model.build import build_module_for_training
from terakoya_compare import recipes
from terakoya_compare.compare import compare
from terakoya_compare.document_losses import COPIES, masked_copies
from terakoya_compare.row_losses import find_blocks
from terakoya_compare.shared_start import sharing_start
from terakoya_compare.tasks import answers
from terakoya_quality.finetuning.kinds import KINDS
from terakoya_quality.finetuning.rows import Row
from terakoya_quality.finetuning.task import Feature

SUITE = """
name: Toys
url: https://example.com/toys
settings: {learning_rates: [1e-2], epochs: [2], batch_size: 8, max_length: 16}
tasks:
  toy_labels:
    title: Toy labels
    task: classification
    files: {train: train.jsonl, eval: eval.jsonl, test: test.jsonl}
    scores: [accuracy, macro_f1]
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def runs(base: Path, store: Path, validation_store: Path) -> list[Path]:
    """Two runs with other learning rates; the second one has learned with other masks."""
    for name, rate, masked in (("a", 0.005, 0.2), ("b", 0.02, 0.4)):
        changes = {"optimizer": {"type": "adamw", "learning_rate": rate}, "evaluation": None, "max_steps": 8,
                   "objective": {"type": "masked_lm", "mlm_probability": masked}}  # fmt: skip
        train(toy.parameters(store, validation_store, **changes), base / name)
    return [base / "a", base / "b"]


@pytest.fixture(scope="module")
def models(base: Path) -> list[Path]:
    """Two masked models with one tokenizer."""
    folders = [make_model(base / name) for name in ("one", "other")]
    weights = load_file(folders[1] / "model.safetensors")
    torch.manual_seed(1)
    changed = {name: weight + 0.1 * torch.randn_like(weight) for name, weight in weights.items()}
    save_file(changed, folders[1] / "model.safetensors", metadata={"format": "pt"})
    return folders


@pytest.fixture(scope="module")
def texts(base: Path) -> Path:
    draw = np.random.default_rng(5)
    rows = [{"text": " ".join(draw.choice(WORDS, size=draw.integers(1, 40)))} for _ in range(25)]
    return write(base / "texts.jsonl", rows)


def test_runs_have_the_losses_of_evaluate_on_the_rows_and_masks_of_the_first(runs: list[Path]) -> None:
    found = compare(runs)
    expected = next(iter(evaluate(runs[0]).results.values()))
    by_score = {each.score: each for each in found.differences}
    assert list(by_score) == ["loss", "masked_bits_per_character", "masked_accuracy"]
    for score, each in by_score.items():
        assert each.values[0] == pytest.approx(expected[score], rel=1e-5)
        assert each.test.difference == pytest.approx(each.values[1] - each.values[0])
        assert each.test.interval is not None and each.test.interval[0] <= each.test.difference <= each.test.interval[1]
    assert by_score["loss"].further["tokens"] == expected["tokens"]
    assert any("objective.mlm_probability" in note for note in found.notes)
    same = compare([runs[0], runs[0]]).differences[0]
    assert (same.test.difference, same.test.p, same.better) == (0, 1, None) and same.names[0] != same.names[1]


def test_rows_that_share_a_document_are_one_block(validation_store: Path, runs: list[Path]) -> None:
    parameters = Parameters.load(runs[0] / "parameters.json")
    source = validation_rows(
        open_store(validation_store), parameters.objective.row_layout(), sequence_length=16, seed=1
    )  # fmt: skip
    blocks = find_blocks(source, source.spread(len(source)))
    documents = [set(source.documents(0, np.array([row])).tolist()) for row in range(len(source))]
    for one in range(len(source)):
        for other in range(one):
            assert blocks[one] == blocks[other] or not documents[one] & documents[other]
    assert 1 < len(set(blocks.tolist())) < len(source) and max(blocks) == len(set(blocks.tolist())) - 1
    some = source.spread(len(source) // 3)
    for block in set(find_blocks(source, some).tolist()):
        assert len({blocks[row] for row in some[find_blocks(source, some) == block]}) == 1, "of some rows, of all"


def test_every_token_of_a_masked_model_is_predicted_once(models: list[Path], texts: Path) -> None:
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(models[1]).eval(), AutoTokenizer.from_pretrained(models[1])
    total = count = characters = 0
    for number, line in enumerate(texts.read_text().splitlines()):
        text = json.loads(line)["text"]
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
        seen = []
        for item in masked_copies(ids, (2, 3, 4), 24, number):
            assert (item.ids == 4).sum() == len(item.positions) <= -(-22 // COPIES)
            with torch.no_grad():
                logits = model(torch.tensor(item.ids[None])).logits[0].double().log_softmax(-1)
            total -= float(logits[item.positions, item.labels].sum())
            seen += item.labels.tolist()
        assert sorted(seen) == sorted(ids.tolist())
        count, characters = count + len(ids), characters + len(text)
    found = compare(models, corpus=[str(texts)]).differences
    assert [each.score for each in found] == ["loss", "bits_per_character"]
    assert found[0].values[1] == pytest.approx(total / count, rel=1e-6)
    assert found[1].values[1] == pytest.approx(total / np.log(2) / characters, rel=1e-6)
    assert found[0].further["tokens"] == [count, count] and found[0].pairs == "25 documents"


def make_causal(folder: Path, tokenizer: Path) -> Path:
    torch.manual_seed(2)
    GPT2LMHeadModel(GPT2Config(vocab_size=15, n_positions=32, n_embd=16, n_layer=1, n_head=2)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def test_causal_models_have_the_losses_of_evaluate(models: list[Path], texts: Path, tmp_path: Path) -> None:
    gpt = make_causal(tmp_path / "gpt", models[0])
    found = compare([gpt, gpt], corpus=[str(texts)]).differences
    expected = evaluate(gpt, corpora={"t": Corpus([texts])}).results["t"]
    assert [each.values[0] for each in found] == pytest.approx([expected["loss"], expected["bits_per_character"]])
    assert found[0].further["tokens"] == [expected["tokens"]] * 2


def test_other_tokenizers_compare_in_bits_a_character_alone(models: list[Path], texts: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "swapped")
    content = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(content.replace('"kami"', '"xx"').replace('"ton"', '"kami"'))
    found = compare([models[0], other], corpus=[str(texts)])
    assert [each.score for each in found.differences] == ["bits_per_character"] and "other tokens" in found.notes[0]
    kind = registry().component("tokenizers", "huggingface")()
    prepare_corpus(Corpus([texts]), kind, models[0], tmp_path / "store")
    assert len(compare(models, stores=[tmp_path / "store"]).differences) == 2
    with pytest.raises(UserError, match=r"another tokenizer .*give --corpus FILE"):
        compare([models[0], other], stores=[tmp_path / "store"])


def recipe(folder: Path, store: Path, validation: Path, name: str = "recipe", **changes: Any) -> Path:
    settings = toy.parameters(store, validation, evaluation=None, max_steps=4, trackers=[], **changes)
    file = folder / f"{name}.json"
    file.write_text(json.dumps(settings))
    return file


def test_recipes_are_trained_in_pairs_and_go_on_where_they_were_stopped(
    store: Path, validation_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = recipe(tmp_path, store, validation_store)
    real, trained = recipes.train_in_this_process, list[Path]()

    def stop_at_the_third(parameters: Any, folder: Path, options: Any) -> Any:
        trained.append(folder)
        if len(trained) == 3:
            raise Stopped("stopped")
        return real(parameters, folder, options)

    monkeypatch.setattr(recipes, "train_in_this_process", stop_at_the_third)
    words = ["compare", str(file), "--change", "optimizer.learning_rate=0.02", "--seeds", "2", "--out",
             str(tmp_path / "out"), "--json", "--page", str(tmp_path / "page.html")]  # fmt: skip
    assert call(capsys, *words)[0] == 75
    code, out, _ = call(capsys, *words)
    assert code == 0
    found = json.loads(out)
    names = [f"{each.parent.name}/{each.name}" for each in trained]
    change = "optimizer.learning_rate=0.02"
    assert names == ["recipe/seed-1", f"{change}/seed-1", "recipe/seed-2", "recipe/seed-2", f"{change}/seed-2"]
    paired, unpaired = found["differences"][:2]
    losses = [[next(iter(evaluate(tmp_path / "out" / each / f"seed-{seed}").results.values()))["loss"]
               for seed in (1, 2)] for each in ("recipe", change)]  # fmt: skip
    assert np.array(paired["seeds"]) == pytest.approx(np.array(losses), rel=1e-5)
    assert paired["difference"] == pytest.approx(np.mean(losses[1]) - np.mean(losses[0]), rel=1e-4)
    assert (paired["method"], unpaired["method"]) == ("paired t", "unpaired t")
    assert paired["fewer_runs"] == pytest.approx((unpaired["deviation"] / paired["deviation"]) ** 2)
    assert "<table>" in (tmp_path / "page.html").read_text()
    one = compare([file], changes=[change], seeds=1, out=tmp_path / "out")
    assert one.differences[0].test.interval is None and "one seed" in one.notes[-1] and len(trained) == 5


def test_recipes_of_other_shapes_begin_alike_where_they_can(store: Path, tmp_path: Path) -> None:
    first = recipe(tmp_path, store, store)
    architecture = {**toy.parameters(store)["architecture"], "intermediate_size": 48}
    other = Parameters.load(recipe(tmp_path, store, store, "other", architecture=architecture), ["seed=7"])
    vocabulary = open_store(store).facts.vocabulary

    def weights(parameters: Parameters) -> Mapping[str, torch.Tensor]:
        return dict(build_module_for_training(parameters, vocabulary).named_parameters())

    wanted, alone = weights(Parameters.load(first, ["seed=7"])), weights(other)
    with sharing_start(first):
        shared = weights(other)
    fitting = [name for name in wanted if wanted[name].shape == shared[name].shape]
    assert 0 < len(fitting) < len(wanted) and all(torch.equal(wanted[name], shared[name]) for name in fitting)
    assert not all(torch.equal(wanted[name], alone[name]) for name in fitting)


def test_answers_of_all_examples_have_the_scores_of_the_task() -> None:
    random = np.random.default_rng(6)
    given: dict[str, list[dict[str, Any]]] = {
        "classification": [{"text": "x", "label": "ab"[number % 2]} for number in range(12)],
        "regression": [{"text": "x", "label": float(number % 5)} for number in range(12)],
        "choice": [{"question": "x", "choices": ["a", "b", "c"], "label": number % 3} for number in range(12)],
        "ner": [{"tokens": ["a", "b", "c"], "tags": ["B-X", "I-X", "O"][number % 2 :] + ["O"] * (number % 2)}
                for number in range(12)],
        "qa": [{"question": "x", "context": "abcdef", "answers": [{"text": "abcdef"[number % 4 :][:2],
                "answer_start": number % 4}]} for number in range(12)],
    }  # fmt: skip
    for name, values in given.items():
        rows = [Row(f"line {number}", each) for number, each in enumerate(values)]
        task = KINDS[name](rows)
        examples = task.read(rows)
        spans = [(number, number + 1) for number in range(6 if name == "qa" else 3)]
        features = [Feature([], [0] * len(spans) if name == "ner" else 0, number, spans) for number in range(12)]
        shape: tuple[int, ...] = {"classification": (2,), "regression": (), "choice": (3,),
                                  "ner": (3, len(task.labels)), "qa": (6, 2)}[name]  # fmt: skip
        logits = [np.asarray(random.normal(size=shape)) for _ in examples]
        right, scores = answers(task, examples, features, logits)
        expected = dict(task.scores(examples, features, logits))
        expected.pop("recall_limit", None)  # of the tokenizer alone
        assert {score: each(np.arange(12)) for score, each in scores.items()} == pytest.approx(expected)
        if right is not None and name != "ner":
            assert right.mean() == pytest.approx(expected.get("accuracy", expected.get("exact_match")))


def test_models_are_compared_after_the_same_fine_tuning(models: list[Path], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "toys.yaml").write_text(SUITE)
    for name, seed in (("train", 1), ("eval", 2), ("test", 3)):
        write(tmp_path / f"data/{name}.jsonl", classified(40, seed))
    words = ["compare", *map(str, models), "--task", str(tmp_path / "toys.yaml"), "--data", str(tmp_path / "data")]
    found = json.loads(call(capsys, *words, "--seeds", 2, "--json")[1])["differences"]
    assert [(each["score"], each["pairs"]) for each in found] == [
        (score, pairs) for score in ("accuracy", "macro_f1") for pairs in ("40 examples", "2 seeds")
    ]
    for side, model in zip(("value_a", "value_b"), models, strict=True):
        tuned = evaluate(model, tasks=[str(tmp_path / "toys.yaml")], stores=[tmp_path / "data"], tuning={"seeds": 2})
        assert found[0][side] == pytest.approx(tuned.finetuned["toy_labels"]["scores"]["test"]["accuracy"]["mean"])
    assert found[0]["method"] == "exact sign flips" and found[1]["method"] == "paired t"


def test_small_models_get_rates_that_suit_them_in_a_bundled_suite(
    models: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in `evaluate --tasks`: the suite's are those of 110 million parameters."""
    for name, seed in (("train", 1), ("valid", 2)):
        rows = [{"sentence": each["text"], "label": each["label"]} for each in classified(8, seed)]
        write(tmp_path / f"jcola-v1.0/in_domain_{name}-v1.0.json", rows)
    compare(models, tasks=["jcola"], data=tmp_path, seeds=1)
    told = [record.getMessage() for record in caplog.records if "is taken" in record.getMessage()]
    assert len(told) == len(models) and all("muon with 0.005 is taken" in each for each in told)


def test_what_cannot_be_compared_is_refused(
    runs: list[Path], models: list[Path], texts: Path, store: Path, tmp_path: Path
) -> None:
    causal = make_causal(tmp_path / "gpt", models[0])
    file, out = recipe(tmp_path, store, store), tmp_path / "out"
    cases: list[tuple[str, list[Path], dict[str, Any]]] = [
        ("expected something to compare it with", runs[:1], {}),
        ("is a parameter file, .* a model or a run", [file, runs[0]], {}),
        ("nothing to compare on", models, {}),
        ("is a causal model, .* a masked one", [models[0], causal], {"corpus": [str(texts)]}),
        ("another tokenizer .*give --corpus", runs, {"stores": [toy_of_other_tokenizer(tmp_path)]}),
        ("--seeds and --data: for --task and parameter files alone", runs, {"seeds": 2}),
        ("--change: for parameter files alone", runs, {"changes": ["seed=2"]}),
        ("expected --out, the folder for the runs", [file], {"changes": ["max_steps=5"]}),
        ("is the same recipe as", [file, file], {"out": out}),
        ("--task, --corpus and --data: are for models", [file, file], {"tasks": ["jsts"]}),
        ("expected --data, the folder", models, {"tasks": ["jsts"]}),
        ("expected a Transformers folder, a checkpoint or a run, got no such folder", [tmp_path / "x", runs[0]], {}),
    ]  # fmt: skip
    for message, sources, options in cases:
        with pytest.raises(UserError, match=message):
            compare(sources, **options)


def toy_of_other_tokenizer(folder: Path) -> Path:
    return toy.make_store(folder / "toy", documents=4, seed=1, vocabulary=150)


def test_without_quality_tasks_are_refused_by_name(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terakoya_compare.tasks.find_spec", lambda name: None)
    with pytest.raises(UserError, match="belongs to the family quality, which is not installed"):
        compare(models, tasks=["jsts"], data=Path())
