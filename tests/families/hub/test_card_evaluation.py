"""A card says how good its model is, in words and in metadata that huggingface_hub reads back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from terakoya.errors import UserError
from terakoya.runs.metrics import Metrics
from terakoya.toolkit.formats.model_files import SCORES
from terakoya_hub import card_evaluation, card_training, card_use, model_card
from terakoya_hub.model_card import Card
from terakoya_hub.scores import read_evaluation, read_kept

MASKED = {"loss": 3.0, "mlm_loss": 3.0, "masked_accuracy": 0.25}
CAUSAL = {"loss": 2.0, "lm_loss": 2.0, "token_accuracy": 0.5, "perplexity": math.exp(2.0)}
ELECTRA = {
    "loss": 13.0, "generator_loss": 3.0, "generator_accuracy": 0.25, "discriminator_loss": 0.2,
    "discriminator_accuracy": 0.9, "discriminator_auc": float("nan"),
}  # fmt: skip
FAMILIES: list[tuple[dict[str, str], dict[str, float], str]] = [
    *(({"": f"{name}ForMaskedLM"}, MASKED, "fill-mask") for name in ("Bert", "Roberta", "ModernBert", "DebertaV2")),
    ({"": "BertForPreTraining"}, {**MASKED, "loss": 3.7, "nsp_loss": 0.7}, "fill-mask"),
    *(({"": name}, CAUSAL, "text-generation") for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "GPTJForCausalLM")),
    ({"": "T5ForConditionalGeneration"}, {"span_loss": 4.0, "loss": 4.0}, "text2text-generation"),
    ({"": "ElectraForPreTraining"}, ELECTRA, "token-classification"),
    ({"discriminator": "ElectraForPreTraining", "generator": "ElectraForMaskedLM"}, ELECTRA, "fill-mask"),
    ({"": "AutoModel"}, MASKED, "feature-extraction"),
]


def write(models: dict[str, str], values: dict[str, float], monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    earlier = {"kind": "validation", "store": "/home/me/work/held: out", "step": 5, "time": 1.0, "loss": 99.0}
    last = {**earlier, "step": 10, **values}
    monkeypatch.setattr(card_training, "describe", lambda manifest, written: "")
    monkeypatch.setattr(card_training, "origins", lambda manifest: [])
    monkeypatch.setattr(card_use, "describe", lambda classes, manifest: "")
    monkeypatch.setattr(model_card, "_parameters", lambda manifest: "")
    facts = card_training.TrainingFacts({}, Metrics((earlier, last)))
    return Card("school/tiny", models, facts, languages=["ja"], **options).text()


@pytest.mark.parametrize(("models", "values", "task"), FAMILIES, ids=lambda each: str(each)[:40])
def test_the_metadata_of_every_family_is_read_back(
    models: dict[str, str], values: dict[str, float], task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = ModelCard(write(models, values, monkeypatch))
    found = {each.metric_name: each for each in card.data.eval_results or ()}
    assert card.data.model_name == "tiny" and {each.task_type for each in found.values()} == {task}
    assert {each.dataset_name for each in found.values()} == {"held: out"}, "no folders of this machine"
    for name, value in values.items():
        shown = found.get(f"{card_evaluation.meaning(name)} (validation at step 10)")
        if math.isnan(value) or (name == "loss" and list(values.values()).count(value) > 1):
            assert shown is None, "not a number, or there under another name"
        else:
            assert shown is not None and shown.metric_value == pytest.approx(value, abs=1e-6)
    if "masked_accuracy" in values or "generator_loss" in values:
        shown = found["perplexity of masked tokens (validation at step 10)"]
        assert shown.metric_type == "perplexity" and shown.metric_value == pytest.approx(math.exp(3.0), abs=1e-5)


def test_what_evaluate_wrote_is_on_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"data": "corpora/news.jsonl", "pseudo_perplexity": 12.5, "bits": None, "lines": 100}
    settings = {"length": 512, "limit": 100, "stride": None}
    content = {
        "measure": "pseudo-perplexity",
        "settings": settings,
        "results": [result],
        "tasks": {"jnli": {"acc,none": 0.75}},
    }
    file = tmp_path / "evaluation.json"
    file.write_text(json.dumps(content))
    text = write({"": "BertForMaskedLM"}, MASKED, monkeypatch, evaluations=read_evaluation(file))
    found = {each.dataset_name: each for each in ModelCard(text).data.eval_results or ()}
    assert found["news.jsonl"].metric_value == 12.5 and found["news.jsonl"].metric_type == "perplexity"
    assert found["news.jsonl"].metric_args == {"length": 512, "limit": 100}
    assert found["jnli"].metric_value == 0.75
    assert "| news.jsonl | terakoya evaluate, pseudo-perplexity | pseudo perplexity | 12.5000 |" in text
    assert "bits" not in text, "it was not finite"


def test_scores_of_tasks_are_on_the_card_with_their_intervals_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {
        "title": "Toy labels",
        "settings": {"seeds": 2, "epochs": 3},
        "scores": {
            "eval": {"accuracy": {"mean": 0.75, "interval": 0.0123}},
            "test": {"accuracy": {"mean": 0.5, "interval": None}},
        },
    }
    toys = {
        "title": "STS of toys",
        "origin": "vectors of texts, by mteb",
        "settings": {"max_length": 64, "pooling": "mean"},
        "scores": {"validation": {"pearson": {"mean": 0.25, "interval": None}}},
    }
    content = {"results": [], "tasks": {}, "finetuned": {"toy_labels": labels, "toys": toys}}
    (tmp_path / SCORES).write_text(json.dumps(content))
    text = write({"": "BertForMaskedLM"}, MASKED, monkeypatch, evaluations=read_kept(tmp_path))
    assert "| Toy labels | fine-tuned, mean of 2 seeds | accuracy | 0.7500 ± 0.0123 |" in text
    assert "| STS of toys | vectors of texts, by mteb | validation pearson | 0.2500 |" in text
    assert "\n\nvectors of texts, by mteb: max length 64, pooling mean." in text
    found = {each.metric_name: each for each in ModelCard(text).data.eval_results or ()}
    accuracy = found["accuracy (fine-tuned, mean of 2 seeds)"]
    assert accuracy.metric_type == "accuracy" and accuracy.metric_value == 0.75
    assert accuracy.metric_args == {"seeds": 2, "epochs": 3, "half_of_95_percent_interval": 0.0123}


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("{}")
    with pytest.raises(UserError, match=r"expected the file that `terakoya evaluate MODEL ... --out FILE` wrote"):
        read_evaluation(file)


def test_a_card_without_a_measurement_has_no_model_index() -> None:
    text = Card("a/b", {"": "BertForMaskedLM"}).text()
    assert "model-index" not in text and "## Evaluation" not in text


def test_a_model_with_windows_says_what_padding_beyond_them_may_do() -> None:
    """ModernBERT's window reaches half its size to each side."""
    parameters = {"architecture": {"type": "modernbert", "local_attention": 16}, "objective": {"type": "masked_lm"}}
    manifest = {"parameters": parameters, "consumed_tokens": 10, "parameter_count": 5, "step": 2, "max_steps": 2}
    text = card_use.describe(["ModernBertForMaskedLM"], manifest)
    assert "see 8 tokens to each side" in text and 'attn_implementation="eager"' in text
    parameters["architecture"] = {"type": "bert"}
    assert "to each side" not in card_use.describe(["BertForMaskedLM"], manifest)


def test_only_what_is_known_of_the_whole_training_is_claimed() -> None:
    parameters = {"architecture": {"type": "llama"}, "objective": {"type": "causal_lm"}}
    manifest = {"parameters": parameters, "consumed_tokens": 10, "parameter_count": 5, "step": 2, "max_steps": 2}
    text = card_use.describe(["LlamaForCausalLM"], manifest)
    assert "It was not trained to answer" in text and "It was trained on 10 tokens in all, passes over" in text
    started = {"started_from": {"model": {"folder": "/hub/models--school--base/snapshots/12ab"}}}
    text = card_use.describe(["LlamaForCausalLM"], {**manifest, **started})
    assert "It began with the weights of school/base, and was trained on 10 further tokens, passes over" in text
    assert "It continues a text.\n" in text and "not trained to answer" not in text
    text = card_use.describe(["LlamaForCausalLM"], None)
    assert "It continues a text.\n" in text and "not trained to answer" not in text


def test_a_loss_that_was_not_finite_is_an_empty_cell() -> None:
    step = {"kind": "step", "step": 1, "tokens": 8, "loss": None}
    check = {"kind": "validation", "step": 1, "store": "held", "loss": None}
    facts = card_training.TrainingFacts({}, Metrics((step, check, {**step, "step": 2, "tokens": 16, "loss": 2.5})))
    assert card_training.describe_losses(facts).endswith("\n| 1 | 8 |  |  |\n| 2 | 16 | 2.5000 |  |")
