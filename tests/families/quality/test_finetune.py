"""Tiny models learn toy tasks of each kind; plain Transformers computes the same scores from the written folder."""

from __future__ import annotations

import json
import logging
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_exports
import torch
import transformers
from labelled_examples import SPECIAL, WORDS, classified, write
from safetensors.torch import load_file, save_file
from selection import at_night
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from terakoya import finetune
from terakoya.errors import UserError
from terakoya.toolkit.formats import folder_digests
from terakoya.toolkit.formats.model_files import SCORES
from terakoya_hub.scores import read_kept
from terakoya_quality.commands.finetune import PIPELINES
from terakoya_quality.finetuning import loop, metrics
from terakoya_quality.finetuning import model as head
from terakoya_quality.finetuning.answers import Answers
from terakoya_quality.finetuning.entities import NamedEntities, TaggedText, _token_tags, _without_spaces
from terakoya_quality.finetuning.model import ModelUse, load_fast_tokenizer, load_with_head, pad_id, write_model
from terakoya_quality.finetuning.rows import Row
from terakoya_quality.finetuning.settings import MOST_EPOCHS, TuningSettings, suited_epochs
from terakoya_quality.finetuning.similarity import TextVectors
from terakoya_quality.finetuning.task import IGNORED, TextEncoder, sorted_labels
from terakoya_quality.finetuning.texts import Classification

FAST = TuningSettings(learning_rates=(1e-2,), epochs=(4,), batch_size=8)


def loaded(kind: str, folder: Path) -> tuple[Any, Any]:
    """The model and the tokenizer, as a stranger loads them."""
    auto = getattr(transformers, kind)
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def logits_of(model: Any, **inputs: Any) -> np.ndarray:
    with torch.no_grad():
        output = model(**inputs)
    return output.logits[0].numpy() if hasattr(output, "logits") else torch.stack(output[:2], -1)[0].numpy()


def test_classification_is_learnt_and_the_same_seed_gives_the_same_bits(model: Path, tmp_path: Path) -> None:
    train, held_out = write(tmp_path / "t.jsonl", classified(80, 1)), write(tmp_path / "e.jsonl", classified(60, 2))
    settings = FAST.model_copy(update={"learning_rates": (1e-6, 1e-2), "epochs": (3,), "seeds": 2})
    first, second = (
        finetune(model, tmp_path / name, task="classification", train=train, eval=held_out, **dict(settings))
        for name in ("one", "two")
    )
    accuracy = first.scores["eval"]["accuracy"]
    assert accuracy.mean > 0.9 and len(accuracy.values) == 2 and first.chosen == (1e-2, 3)
    assert [each.seed for each in first.trainings] == [1, 1, 2]
    assert [each.scores for each in first.trainings] == [each.scores for each in second.trainings]
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()

    classifier, tokenizer = loaded("AutoModelForSequenceClassification", tmp_path / "one")
    assert classifier.config.id2label == {0: "bad", 1: "good"}
    guesses = [
        classifier.config.id2label[int(logits_of(classifier, **tokenizer(row["text"], return_tensors="pt")).argmax())]
        for row in classified(60, 2)
    ]
    right = np.mean([guess == row["label"] for guess, row in zip(guesses, classified(60, 2), strict=True)])
    assert right == max(accuracy.values)  # the best seed's weights are written
    record = json.loads((tmp_path / "one/terakoya_scores.json").read_text())["finetuned"]["e.jsonl"]
    assert record["scores"]["eval"]["accuracy"]["values"] == accuracy.values and record["settings"]["epochs"] == 3
    assert folder_digests.find_changes(tmp_path / "one") == []


@pytest.mark.parametrize(("parameters", "rate"), [(335e6, 2.9e-5), (110e6, 5e-5), (5e6, 2.3e-4), (1e4, 5e-4)])
def test_the_rate_of_a_model_follows_its_size(parameters: float, rate: float) -> None:
    assert TuningSettings(optimizer="adamw").for_model(int(parameters)).learning_rates == (rate,)


@pytest.mark.parametrize(
    ("parameters", "given", "optimizer", "rate"),
    [
        (3.9e6, {}, "muon", 5e-3),
        (7.5e6, {}, "muon", 2.5e-3),
        (1e7, {}, "adamw", 1.7e-4),
        (3.9e6, {"learning_rates": (1e-3,)}, "adamw", 1e-3),
    ],
)
def test_small_models_get_muon(parameters: float, given: Any, optimizer: str, rate: float) -> None:
    settings = TuningSettings(**given).for_model(int(parameters))
    assert settings.optimizer is not None and settings.optimizer["type"] == optimizer
    assert settings.learning_rates == (rate,)


def test_small_models_learn_names_with_adamw(model: Path, tmp_path: Path) -> None:
    settings = TuningSettings().for_model(int(3.9e6), suits_muon=NamedEntities.suits_muon)
    assert settings.optimizer == {"type": "adamw"} and settings.learning_rates == (2.7e-4,)
    rows = [{"tokens": WORDS[:3], "tags": ["B-X", "O", "O"]}] * 2
    file = write(tmp_path / "t.jsonl", rows)
    result = finetune(model, tmp_path / "out", task="ner", train=file, eval=file, epochs=(1,))
    assert result.as_json()["settings"]["optimizer"]["type"] == "adamw"


@pytest.mark.parametrize(("steps", "epochs"), [(1, 20), (60, 9), (167, 3), (5000, 3)])
def test_few_examples_are_seen_more_often(steps: int, epochs: int) -> None:
    assert suited_epochs(steps) == epochs


def test_without_epochs_there_are_as_many_as_the_examples_want(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", classified(8, 1))
    done: list[tuple[int, int]] = []
    options: dict[str, Any] = {"task": "classification", "train": file, "eval": file, "batch_size": 4}
    result = finetune(model, tmp_path / "out", **options, progress=lambda *each: done.append(each))
    assert result.chosen[1] == MOST_EPOCHS and done[-1] == (2 * MOST_EPOCHS, 2 * MOST_EPOCHS)


def test_without_a_rate_a_model_gets_the_one_of_its_size_and_is_told_of_one_that_is_too_low(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, out = write(tmp_path / "t.jsonl", classified(8, 1)), iter(range(9))
    options: dict[str, Any] = {"task": "classification", "train": file, "eval": file, "epochs": (1,)}
    result = finetune(model, tmp_path / f"{next(out)}", **options)
    assert result.chosen == (5e-3, 1) and result.as_json()["settings"]["optimizer"]["type"] == "muon"
    assert finetune(model, tmp_path / f"{next(out)}", **options, optimizer="adamw").chosen == (5e-4, 1)
    assert finetune(model, tmp_path / f"{next(out)}", **options, learning_rates=[1e-5, 3e-4]).chosen[0] <= 3e-4
    assert not [record for record in caplog.records if "learn little" in record.message]
    finetune(model, tmp_path / f"{next(out)}", **options, learning_rates=[1e-5, 2e-4])
    (told,) = [record.message for record in caplog.records if "learn little" in record.message]
    assert "learn little with a rate of 0.0002: such a small model needs about --optimizer '{" in told
    with pytest.raises(UserError, match="--learning-rate: expected one for lion and a model of this size"):
        finetune(model, tmp_path / "lion", **options, optimizer="lion")


@pytest.mark.parametrize(("is_fast", "precision"), [(False, "fp32"), (True, "bf16")])
def test_a_device_that_is_fast_with_bf16_gets_it(
    is_fast: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terakoya_quality.finetuning.model.multiplies_fast", lambda *asked: is_fast)
    uses = [
        ModelUse.for_training(device, asked, trust=False).precision
        for device in (torch.device("cuda", 0), torch.device("cpu"))
        for asked in (None, "bf16", "fp32")
    ]
    assert uses == [precision, "bf16", "fp32"] * 2


@pytest.mark.nightly
def test_a_deberta_is_finetuned_in_bf16(model: Path, tmp_path: Path) -> None:
    base = tmp_path / "deberta"
    shutil.copytree(model, base)
    config = transformers.DebertaConfig(
        vocab_size=15, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=24, relative_attention=True, pos_att_type=["c2p", "p2c"], type_vocab_size=0,
        pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    transformers.DebertaForMaskedLM(config).save_pretrained(base)
    files = {
        name: write(tmp_path / f"{name}.jsonl", classified(40, seed)) for seed, name in enumerate(("train", "eval"))
    }
    results = {
        precision: finetune(
            base, tmp_path / precision, task="classification", **dict(FAST), precision=precision, **files
        )
        for precision in ("fp32", "bf16")
    }
    exact, rounded = (result.scores["eval"]["accuracy"].mean for result in results.values())
    assert rounded == pytest.approx(exact, abs=0.15) and exact > 0.7


def test_a_finetuned_model_has_no_card_and_scores_of_its_base_and_says_how_many_examples_it_saw(
    model: Path, tmp_path: Path
) -> None:
    base, file = shutil.copytree(model, tmp_path / "base"), write(tmp_path / "t.jsonl", classified(12, 1))
    (base / "README.md").write_text("# The base")
    (base / "training.svg").write_text("<svg/>")
    of_base = {"title": "JSTS", "settings": {}, "scores": {"eval": {"pearson": {"mean": 0.9, "interval": None}}}}
    scores = {"results": [], "tasks": {}, "finetuned": {"jsts": of_base}}
    (base / SCORES).write_text(json.dumps(scores))
    options: dict[str, Any] = {"task": "classification", "train": file, "eval": file}
    for name, limit in (("few", 8), ("all", None)):
        finetune(base, tmp_path / name, **options, epochs=(1,), limit=limit)
        assert not {"README.md", "training.svg"} & {each.name for each in (tmp_path / name).iterdir()}
        (kept,) = read_kept(tmp_path / name)
        assert kept.data == "t.jsonl" and kept.settings.get("limit") == limit
        assert kept.origin.endswith(", of the first 8 examples alone") == (limit is not None)


def test_the_weights_of_the_best_seed_are_kept(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def predict(batches: loop.Batches, *arguments: Any, **options: Any) -> list[np.ndarray]:
        seen.append(batches.model.classifier.weight.detach().clone())
        return []

    monkeypatch.setattr(loop, "predict", predict)
    monkeypatch.setattr(Classification, "scores", lambda *_: {"accuracy": (0.3, 0.9, 0.6)[len(seen) - 1]})
    file = write(tmp_path / "t.jsonl", classified(8, 1))
    settings = TuningSettings(epochs=(1,), seeds=3)
    result = finetune(model, tmp_path / "out", task="classification", train=file, eval=file, **dict(settings))
    written = load_file(tmp_path / "out/model.safetensors")["classifier.weight"]
    assert torch.equal(written, seen[1]) and not torch.equal(seen[0], seen[1])
    assert result.scores["eval"]["accuracy"].mean == pytest.approx(0.6)


CHOSEN = {
    "optimizer": {"type": "adamw", "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.1},
    "schedule": {"type": "cosine", "min_lr": 1e-3},
}


@pytest.mark.parametrize("chosen", [{}, CHOSEN], ids=["as BERT's scripts", "chosen"])
def test_the_weights_are_those_of_a_loop_by_hand(model: Path, chosen: dict[str, Any]) -> None:
    """Five steps with the rates of Transformers' linear schedule, whose first is 0, or with half a cosine to `min_lr`
    after a warm-up whose first step has a part of the peak."""
    rows = [Row(f"row {number}", each) for number, each in enumerate(classified(40, 1))]
    task = Classification(rows)
    tokenizer = load_fast_tokenizer(model, trust=False, needs_offsets=False)
    features = task.features(task.read(rows), TextEncoder(tokenizer, max_length=24, stride=8))
    settings = TuningSettings(batch_size=8, warmup_ratio=0.4, weight_decay=0.2, **chosen)
    ours, theirs = (loop.Batches(load_with_head(model, task, seed=3, trust=False), task, pad=0, precision="fp32")
                    for _ in range(2))  # fmt: skip
    assert loop.train(ours, features, settings, learning_rate=1e-2, epochs=1, seed=7)

    betas, eps, decay = ((0.8, 0.9), 1e-3, 0.1) if chosen else ((0.9, 0.999), 1e-8, 0.2)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(7)).tolist()
    torch.manual_seed(7)
    weights = dict(theirs.model.train().named_parameters())
    first = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()}
    second = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()}
    for step in range(5):
        batch = [features[number] for number in order[8 * step : 8 * step + 8]]
        task.loss(theirs.logits(batch), task.stack_targets(batch)).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        falling = 1e-3 + 9e-3 * (1 + math.cos(math.pi * (step - 2) / 3)) / 2
        rate = ((step + 1) / 2 * 1e-2 if step < 2 else falling) if chosen else min(step / 2, (5 - step) / 3) * 1e-2
        for name, weight in weights.items():
            if weight.grad is not None:
                first[name].lerp_(weight.grad.double(), 1 - betas[0])
                second[name].lerp_(weight.grad.double() ** 2, 1 - betas[1])
                mean, power = (
                    moments[name] / (1 - beta ** (step + 1))
                    for moments, beta in zip((first, second), betas, strict=True)
                )
                shrunk = weight.data.double() * (1 - rate * decay * (weight.ndim >= 2))
                weight.data = (shrunk - rate * mean / (power.sqrt() + eps)).float()
        theirs.model.zero_grad()
    for name, weight in ours.model.named_parameters():
        known = "key.bias" not in name  # whose gradient is 0 but for rounding
        assert not known or torch.allclose(weight, weights[name], rtol=1e-4, atol=2e-5), name


def test_padding_changes_no_logits(model: Path) -> None:
    rows = [Row("x", {"text": "mi " * count, "label": count % 2}) for count in (1, 12, 4)]
    task = Classification(rows)
    tokenizer = load_fast_tokenizer(model, trust=False, needs_offsets=False)
    features = task.features(task.read(rows), TextEncoder(tokenizer, max_length=24, stride=1))
    classifier = load_with_head(model, task, seed=1, trust=False)
    together, alone = (
        loop.predict(loop.Batches(classifier, task, pad=0, precision="fp32"), features, batch_size=size)
        for size in (3, 1)
    )
    assert np.allclose(together, alone, atol=1e-5) and not np.allclose(alone[0], alone[1], atol=1e-3)


def test_a_classifier_finds_the_end_of_a_text_before_the_padding_of_its_tokenizer(tmp_path: Path) -> None:
    tiny = transformers.LlamaConfig(
        vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    transformers.LlamaForCausalLM(tiny).save_pretrained(tmp_path / "base")
    pieces = Tokenizer(WordLevel({"a": 0, "<unk>": 1, "</s>": 2, "b": 3}, unk_token="<unk>"))
    pieces.pre_tokenizer = Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="<unk>", eos_token="</s>")
    made.save_pretrained(tmp_path / "base")
    task = Classification([Row("rows", {"text": "a", "label": each}) for each in (0, 1)])
    tokenizer = load_fast_tokenizer(tmp_path / "base", trust=False, needs_offsets=False)
    plain = load_with_head(tmp_path / "base", task, seed=1, trust=False)
    pad = pad_id(tokenizer, plain, tmp_path / "base")
    classifier = load_with_head(tmp_path / "base", task, seed=1, trust=False, pad=pad)
    write_model(classifier, tmp_path / "base", tmp_path / "out")
    written, tokenizer = loaded("AutoModelForSequenceClassification", tmp_path / "out")
    alone, padded = (
        logits_of(written, **tokenizer(texts, padding=True, return_tensors="pt")) for texts in (["a"], ["a", "b a b"])
    )
    np.testing.assert_allclose(padded, alone, atol=1e-6)
    assert tokenizer.pad_token_id == written.config.pad_token_id == pad


@pytest.mark.nightly
def test_a_number_for_a_pair_is_learnt(model: Path, tmp_path: Path) -> None:
    draw = random.Random(3)
    rows = []
    for _ in range(200):
        first = draw.choice(WORDS[:5])
        second = draw.choice(WORDS[5:])
        rows.append({"text1": first, "text2": second, "label": WORDS.index(first) - WORDS.index(second) / 2})
    train, held_out = write(tmp_path / "t.jsonl", rows[:150]), write(tmp_path / "e.jsonl", rows[150:])
    result = finetune(model, tmp_path / "out", task="regression", train=train, eval=held_out, **dict(FAST))
    regressor, tokenizer = loaded("AutoModelForSequenceClassification", tmp_path / "out")
    predicted = [
        logits_of(regressor, **tokenizer(row["text1"], row["text2"], return_tensors="pt")).item() for row in rows[150:]
    ]
    expected = np.corrcoef(predicted, [row["label"] for row in rows[150:]])[0, 1]
    assert result.scores["eval"]["pearson"].mean == pytest.approx(expected, abs=1e-5) and expected > 0.8


@pytest.mark.parametrize("in_words", at_night([True, False], always=[True]))
def test_names_are_learnt(model: Path, tmp_path: Path, in_words: bool) -> None:
    draw = random.Random(4)
    rows: list[dict[str, Any]] = []
    for _ in range(80):
        words = [draw.choice(WORDS[:4]) for _ in range(6)]
        tags = ["O"] * 6
        if draw.random() < 0.7:
            at = draw.randrange(5)
            words[at : at + 2], tags[at : at + 2] = ["saru", "hika"], ["B-ape", "I-ape"]
        text, spans = " ".join(words), []
        for kind, first, last in metrics.entities(tags):
            start = len(" ".join(words[:first])) + (first > 0)
            spans.append({"start": start, "end": len(" ".join(words[:last])), "label": kind})
        rows.append({"tokens": words, "tags": tags} if in_words else {"text": text, "spans": spans})
    train, held_out = write(tmp_path / "t.jsonl", rows[:50]), write(tmp_path / "e.jsonl", rows[50:])
    settings = FAST.model_copy(update={"epochs": (3,)})
    result = finetune(model, tmp_path / "out", task="ner", train=train, eval=held_out, **dict(settings))
    assert result.scores["eval"]["f1"].mean > 0.8
    assert result.scores["eval"]["recall_limit"].mean == 1
    assert list(result.task.labels) == ["O", "B-ape", "I-ape"]
    if in_words:  # each word is a token here
        tagger, tokenizer = loaded("AutoModelForTokenClassification", tmp_path / "out")
        guesses, gold = [], []
        for row in rows[50:]:
            ids = logits_of(tagger, **tokenizer(" ".join(row["tokens"]), return_tensors="pt"))[1:-1].argmax(-1)
            guesses.append(metrics.entities([tagger.config.id2label[int(id)] for id in ids]))
            gold.append(metrics.entities(row["tags"]))
        assert metrics.span_scores(guesses, gold)["f1"] == result.scores["eval"]["f1"].mean


@pytest.mark.nightly
def test_answers_are_learnt_in_windows(model: Path, tmp_path: Path) -> None:
    """The answer to a question is the word in the context that the question names; contexts need several windows."""
    draw = random.Random(5)
    rows: list[dict[str, Any]] = []
    for _ in range(200):
        words = [draw.choice(WORDS[5:]) for _ in range(draw.randint(5, 30))]
        at, word = draw.randrange(len(words)), draw.choice(WORDS[:3])
        words[at] = word
        start = len(" ".join(words[:at])) + (at > 0)
        rows.append({"question": word, "context": " ".join(words), "answers": [{"text": word, "answer_start": start}]})
    train, held_out = write(tmp_path / "t.jsonl", rows[:160]), write(tmp_path / "e.jsonl", rows[160:])
    settings = FAST.model_copy(update={"max_length": 16, "stride": 4, "epochs": (5,)})
    result = finetune(model, tmp_path / "out", task="qa", train=train, eval=held_out, **dict(settings))
    assert result.scores["eval"]["exact_match"].mean > 0.8
    answerer, tokenizer = loaded("AutoModelForQuestionAnswering", tmp_path / "out")
    short = [row for row in rows[160:] if len(row["context"].split()) <= 12]  # one window
    for row in short:
        scores = logits_of(answerer, **tokenizer(row["question"], row["context"], return_tensors="pt"))[3:-1]
        first, last = scores.argmax(0)
        if first == last:
            assert row["context"].split()[first] == row["answers"][0]["text"]


@pytest.mark.nightly
@pytest.mark.parametrize("own_class", [True, False])
def test_choices_are_learnt(model: Path, tmp_path: Path, own_class: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right choice is the word of the question; also as texts with one number each, without a class of its own."""
    if not own_class:
        monkeypatch.setitem(head.FAMILIES, "AutoModelForMultipleChoice", {})
    draw = random.Random(6)
    rows = []
    for _ in range(200):
        choices = draw.sample(WORDS, 3)
        rows.append({"question": choices[label := draw.randrange(3)], "choices": choices, "label": label})
    train, held_out = write(tmp_path / "t.jsonl", rows[:160]), write(tmp_path / "e.jsonl", rows[160:])
    settings = FAST.model_copy(update={"epochs": (8,)})
    result = finetune(model, tmp_path / "out", task="choice", train=train, eval=held_out, **dict(settings))
    accuracy = result.scores["eval"]["accuracy"].mean
    kind = "AutoModelForMultipleChoice" if own_class else "AutoModelForSequenceClassification"
    chooser, tokenizer = loaded(kind, tmp_path / "out")
    right = 0
    for row in rows[160:]:
        inputs = tokenizer([row["question"]] * 3, row["choices"], return_tensors="pt")
        if own_class:
            inputs = {name: each[None] for name, each in inputs.items()}
        with torch.no_grad():
            right += int(chooser(**inputs).logits.reshape(-1).argmax()) == row["label"]
    assert right / 40 == accuracy and accuracy > 0.5


@pytest.fixture(scope="module")
def japanese(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer of MeCab's words, with a model."""
    base = tmp_path_factory.mktemp("japanese")
    tokenizer = tiny_exports.train_tokenizer(base / "tokenizer", "mecab_wordpiece", vocab_size=300)
    model = tiny_exports.make_model("bert", "masked", tokenizer, "mecab_wordpiece")
    from terakoya.toolkit.formats import transformers_folder

    (base / "model").mkdir()
    transformers_folder.write(model, tokenizer, base / "model")
    return base / "model"


def test_positions_in_japanese_text_are_characters(japanese: Path) -> None:
    text, name = "図書館で借りた本を、電車の中で読み終えた。", "電車"
    start = text.index(name)
    tokenizer = load_fast_tokenizer(japanese, trust=False, needs_offsets=True)
    encoder = TextEncoder(tokenizer, max_length=32, stride=4)
    row = Row("x", {"text": text, "spans": [{"start": start, "end": start + 2, "label": "THING"}]})
    tagging = NamedEntities([row])
    (feature,) = tagging.features(tagging.read([row]), encoder)
    perfect = np.eye(3)[np.where(np.array(feature.target) == IGNORED, 0, feature.target)]
    assert tagging.scores(tagging.read([row]), [feature], [perfect]) == dict.fromkeys(NamedEntities.metrics, 1.0)
    start, end = next(span for span in feature.spans if span is not None and span[1] - span[0] > 1)
    row = Row("x", {"text": text, "spans": [[start, end - 1, "THING"], [end, end + 1, "THING"]]})
    (feature,) = tagging.features(tagging.read([row]), encoder)
    assert tagging.scores(tagging.read([row]), [feature], [perfect])["recall_limit"] == 0.5

    words = ["読み終えた本", "を", "図書館"]
    tagging = NamedEntities([Row("x", {"tokens": words, "tags": ["B-BOOK", "O", "B-PLACE"]})])
    (feature,) = tagging.features([TaggedText(words, frozenset(), ["B-BOOK", "O", "B-PLACE"])], encoder)
    assert [span for span in feature.spans if span is not None] == [(0, 1), (1, 2), (2, 3)]
    assert len(feature.spans) > 5  # words of several pieces, of which the first has the tag
    assert [tagging.labels[each] for each in feature.target if each != IGNORED] == ["B-BOOK", "O", "B-PLACE"]

    assert _without_spaces("x 東京 ", 1, 5) == (2, 4) and _without_spaces("x  ", 1, 3) is None

    name = text[start : start + 9]  # some windows have a part of it
    asked = Row("x", {"question": "何？", "context": text * 4, "answers": [{"text": name, "answer_start": start}]})
    answering = Answers([asked])
    windows = answering.features(answering.read([asked]), TextEncoder(tokenizer, max_length=18, stride=9))
    assert len(windows) > 2 and sum(window.target != [0, 0] for window in windows) >= 1
    for window in windows:
        assert len(window.inputs[0]["input_ids"]) <= 18
        if window.target != [0, 0]:
            first, last = (window.spans[at] for at in window.target)
            assert first is not None and last is not None and (text * 4)[first[0] : last[1]] == name
    scores = [np.zeros((len(window.spans), 2)) for window in windows]
    best = next(number for number, window in enumerate(windows) if window.target != [0, 0])
    for side in (0, 1):
        scores[best][windows[best].target[side], side] = 5.0
    assert answering.scores(answering.read([asked]), windows, scores)["exact_match"] == 1


def test_a_token_of_two_names_has_one_tag_whatever_the_order_of_a_set() -> None:
    """Python orders sets of texts by a seed that differs from one process to the next."""
    for number in range(30):
        spans = {(f"A{number}", 0, 1), (f"B{number}", 1, 4)}
        tags = _token_tags([(0, 2), (2, 4), (4, 5)], frozenset(spans))
        assert tags == [f"B-B{number}", f"I-B{number}", "O"]


def test_labels_are_ordered_by_value() -> None:
    """F1 is of the second of two."""
    assert sorted_labels({"1", "-1"}) == ["-1", "1"]
    assert sorted_labels({"10", "2", "-10", "a", "-"}) == ["-10", "2", "10", "-", "a"]


REFUSALS: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]], str]] = [
    ("classification", [{"sentence": "mi", "label": 1}, {"label": 0}], [{}], 'line 1: has no column "text", nor'),
    ("classification", [{"text": "mi", "label": 1}], [{}], 'at least two labels to tell apart, found only "1"'),
    ("classification", [{"text": "mi", "label": each} for each in ("a", "b", "a ")], [{}],
     't.jsonl: the labels "a" and "a " differ in white space alone; make them one'),
    ("regression", [{"text": "mi", "label": 3}] * 2, [{}], "t.jsonl: expected examples with at least two numbers"),
    ("regression", [{"text": "mi", "label": each} for each in (3, 4)], [{"text": "mi", "label": 3}],
     "e.jsonl: expected examples with at least two numbers to tell apart, found only 3"),
    ("classification", classified(4, 1), [{"text": "mi", "label": "ugly"}], 'line 1: the label "ugly" does not occur'),
    ("classification", [{"text": "mi", "label": 0.5}], [{}], "expected text or a whole number, got 0.5"),
    ("regression", [{"text": "mi", "label": "high"}], [{}], 'label: expected a number, got "high"'),
    ("regression", [{"text": "mi", "label": "nan"}], [{}], 'label: expected a number, got "nan"'),
    ("ner", [{"tokens": ["mi"], "tags": ["X"]}], [{}], 'tags: expected O, B-TYPE or I-TYPE (also E-TYPE, S-TYPE), got'),
    ("ner", [{"tokens": ["mi", "ton"], "tags": ["B-X"]}], [{}], "got 2 tokens and 1 tags"),
    ("ner", [{"text": "mi", "spans": [[0, 3, "X"]]}], [{}], "positions within the 2 characters, got 0 to 3"),
    ("ner", [{"text": "mi ton", "spans": [[0, 3, "X"], [2, 4, "X"]]}], [{}], "X at 2 begins before 3"),
    ("ner", [{"text": "mi", "spans": [[0, 2, "X"]]}], [{"text": "mi", "spans": [[0, 2, "Y"]]}], '"B-Y" does not occur'),
    ("qa", [{"question": "a", "context": "b c", "answers": [{"text": "c", "answer_start": 1}]}], [{}],
     'answers: "c" does not stand at 1 of the context'),
    ("qa", [{"question": "a", "context": "b c", "answers": []}], [{}], "expected at least one {text, answer_start}"),
    ("choice", [{"question": "a", "choices": ["b"], "label": 0}], [{}], "expected at least two choices"),
    ("choice", [{"question": "a", "choice0": "b", "choice1": "c", "label": 2}], [{}], "0 to 1, got 2"),
    ("typo", classified(4, 1), [{}], "--task typo: expected a kind of task"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "train", "held_out", "message"), REFUSALS)
def test_what_is_no_example_is_refused(
    model: Path, tmp_path: Path, task: str, train: list[dict[str, Any]], held_out: list[dict[str, Any]], message: str
) -> None:
    files = [write(tmp_path / "t.jsonl", train), write(tmp_path / "e.jsonl", held_out)]
    with pytest.raises(UserError) as refused:
        finetune(model, tmp_path / "out", task=task, train=files[0], eval=files[1])
    assert message in str(refused.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("copies", "told"), [(2, True), (0, False)])
def test_labels_are_counted_and_examples_of_the_training_set_in_another_are_told_of(
    copies: int, told: bool, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="terakoya")
    rows = [{"text": f"mi {'ton ' * number}", "label": "ab"[number % 3 == 0]} for number in range(12)]
    files = [write(tmp_path / "t.jsonl", rows[:8]), write(tmp_path / "e.jsonl", rows[8 - copies :])]
    finetune(model, tmp_path / "out", task="classification", train=files[0], eval=files[1], epochs=[1])
    assert f"{files[0]}: 2 labels, and how many examples have them: a (5), b (3)" in caplog.messages
    warning = f"eval: {copies} of {4 + copies} examples are among the training examples: the scores tell how well they"
    assert any(each.startswith(warning) for each in caplog.messages) is told
    assert any("among the training examples" in each for each in caplog.messages) is told


def test_long_texts_are_cut_and_counted(model: Path, tmp_path: Path) -> None:
    rows = [*classified(6, 1), {"text": "mi " * 40, "label": "bad"}]
    file = write(tmp_path / "t.jsonl", rows)
    settings = TuningSettings(epochs=(1,))
    result = finetune(model, tmp_path / "out", task="classification", train=file, eval=file, **dict(settings))
    assert result.cut == {"train": 1, "eval": 1} and result.settings.max_length == 24
    with pytest.raises(UserError, match="max_length 25: the model takes at most 24 tokens"):
        settings = TuningSettings(max_length=25)
        finetune(model, tmp_path / "new", task="classification", train=file, eval=file, **dict(settings))


def test_a_head_for_other_labels_is_replaced(model: Path, tmp_path: Path) -> None:
    two = write(tmp_path / "two.jsonl", classified(4, 1))
    three = write(tmp_path / "three.jsonl", [*classified(4, 1), {"text": "mi", "label": "neither"}])
    settings = TuningSettings(epochs=(1,))
    finetune(model, tmp_path / "first", task="classification", train=two, eval=two, **dict(settings))
    finetune(tmp_path / "first", tmp_path / "new", task="classification", train=three, eval=three, **dict(settings))
    assert load_file(tmp_path / "new/model.safetensors")["classifier.weight"].shape == (3, 32)


@pytest.mark.parametrize(
    ("family", "last", "kept"), [("Bert", "classifier", "bert.pooler"), ("ModernBert", "classifier", "head")]
)
def test_a_head_for_as_many_labels_is_replaced(model: Path, tmp_path: Path, family: str, last: str, kept: str) -> None:
    """The layers below it, also those that are outside of the base model, stay."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=15, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=24, pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
    )  # fmt: skip
    shutil.copytree(model, tmp_path / "first")
    getattr(transformers, f"{family}ForSequenceClassification")(config).save_pretrained(tmp_path / "first")
    trained = load_file(tmp_path / "first/model.safetensors")
    task = Classification([Row("x", {"text": "mi", "label": label}) for label in ("yes", "no")])
    first, second, again = (load_with_head(tmp_path / "first", task, seed=n, trust=False) for n in (1, 2, 1))
    weights, others, same = (each.state_dict() for each in (first, second, again))
    name = f"{last}.weight"
    assert not torch.equal(weights[name], trained[name]) and not torch.equal(weights[name], others[name])
    assert torch.equal(weights[name], same[name]) and weights[name].std() > 0
    assert any(each.startswith(kept) for each in trained)
    assert all(torch.equal(weights[each], trained[each]) for each in trained if not each.startswith(last))


def test_models_that_do_not_fit_are_refused(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", classified(4, 1))
    broken = tmp_path / "broken"
    broken.mkdir()
    for each in model.iterdir():
        (broken / each.name).write_bytes(each.read_bytes())
    state = load_file(broken / "model.safetensors")
    del state["bert.encoder.layer.0.output.dense.weight"]
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"has no weights for bert\.encoder\.layer\.0\.output\.dense\.weight"):
        finetune(broken, tmp_path / "out", task="classification", train=file, eval=file)
    state = load_file(model / "model.safetensors")
    embeddings = "bert.embeddings.word_embeddings.weight"
    state[embeddings] = state[embeddings][:-1].clone()
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    told = r"word_embeddings\.weight has the shape \[14, 32\], expected \[15, 32\]; Transformers would initialise them"
    with pytest.raises(UserError, match=told):
        finetune(broken, tmp_path / "out", task="classification", train=file, eval=file)
    with pytest.raises(UserError, match="expected a Transformers folder"):
        finetune(tmp_path / "none", tmp_path / "out", task="classification", train=file, eval=file)
    state = load_file(model / "model.safetensors")
    state["bert.encoder.layer.0.output.dense.weight"].fill_(torch.nan)
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    told = r"the loss is nan and its gradient's norm nan \(\w+, cpu\): that is no matter of the learning rate"
    with pytest.raises(UserError, match=f"before anything was trained, {told}"):
        finetune(broken, tmp_path / "out", task="classification", train=file, eval=file)
    with pytest.raises(UserError, match=r"has no weights for encoder\.layer\.0\.output\.dense\.weight"):
        del state["bert.encoder.layer.0.output.dense.weight"]
        save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
        TextVectors(broken, max_length=None, use=ModelUse(device=torch.device("cpu")))
    settings = TuningSettings(learning_rates=(1e30,), epochs=(3,), batch_size=1)
    with pytest.raises(UserError, match=r"the loss is not finite with learning rate 1e\+30; try smaller ones"):
        finetune(model, tmp_path / "out", task="classification", train=file, eval=file, **dict(settings))


@pytest.mark.parametrize(("steps", "broken"), [(1, 1), (3, 3), (3, 2)])
def test_a_gradient_that_is_not_finite_is_noticed_also_in_the_last_step(
    steps: int, broken: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose weights became NaN after its last loss is neither scored nor written."""
    file = write(tmp_path / "t.jsonl", classified(2 * steps, 1))
    clip, taken = torch.nn.utils.clip_grad_norm_, [0]

    def clip_broken(parameters: Any, largest: float) -> torch.Tensor:
        taken[0] += 1
        weights = list(parameters)
        if taken[0] == broken:
            weights[0].grad.fill_(torch.nan)
        return clip(weights, largest)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_broken)
    settings = TuningSettings(epochs=(1,), batch_size=2)
    told = "before anything was trained" if broken == 1 else "the loss is not finite with learning rate"
    with pytest.raises(UserError, match=told):
        finetune(model, tmp_path / "out", task="classification", train=file, eval=file, **dict(settings))
    assert taken[0] == steps and not (tmp_path / "out").exists()


def test_a_text_without_a_token_is_refused_with_its_line(tmp_path: Path) -> None:
    """A decoder's tokenizer often adds no special tokens, so that an empty cell of a table is an input of no tokens."""
    pieces = Tokenizer(WordLevel({piece: number for number, piece in enumerate([*SPECIAL, *WORDS])}, "[UNK]"))
    pieces.pre_tokenizer = Whitespace()
    folder, file = tmp_path / "model", write(tmp_path / "t.jsonl", [*classified(4, 1), {"text": " ", "label": "bad"}])
    transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, pad_token="[PAD]").save_pretrained(folder)
    config = transformers.GPT2Config(vocab_size=15, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    with pytest.raises(UserError, match=r"t\.jsonl, line 5: its text has no tokens"):
        finetune(folder, tmp_path / "out", task="classification", train=file, eval=file, **dict(FAST))


def test_the_pipelines_that_the_command_names_are_there() -> None:
    assert set(PIPELINES.values()) <= set(transformers.pipelines.PIPELINE_REGISTRY.get_supported_tasks())
