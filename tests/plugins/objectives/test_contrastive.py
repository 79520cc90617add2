"""Contrastive learning against plain Transformers in float64, document by document; and the loss of a step, however its
rows are divided."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from saved_weights import relative_error, weights
from test_masked_lm import BERT, VOCABULARY, rows, tensors
from torch import Tensor
from transformers import BertModel

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.toolkit.architectures import attention
from terakoya.training.engines.compared_examples import compare_examples, sums_of_examples
from terakoya_contract.objective import select_rows
from terakoya_plugins.architectures.bert import Bert
from terakoya_plugins.objectives.contrastive import Contrastive

GIVEN = [[9, 12], [20], [5, 8, 9], [4]]
EXAMPLES = 5
"""Documents of at least eight tokens."""


def module_of(objective: Contrastive, architecture: Bert = BERT) -> Any:
    torch.manual_seed(0)
    module = objective.build(architecture, VOCABULARY).double()
    attention.use(module, "sdpa")
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return module


def expected_loss(embeddings: Tensor, temperature: float) -> Tensor:
    """The loss of SimCSE, equation 1, of embeddings (E, 2, H), summed; example by example."""
    total = torch.zeros((), dtype=torch.float64)
    for i, (first, _) in enumerate(embeddings):
        scores = [torch.cosine_similarity(first, second, dim=0) / temperature for _, second in embeddings]
        total = total - torch.log(torch.exp(scores[i]) / sum(torch.exp(each) for each in scores))
    return total


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_halves_have_the_loss_and_gradients_of_separate_sequences(pooling: Any) -> None:
    objective = Contrastive(views="halves", pooling=pooling, temperature=0.1)
    module = module_of(objective)
    given = rows(GIVEN)
    batch = objective.collate(given, VOCABULARY)
    assert batch.counts == {"examples": EXAMPLES, "tokens": int((given.document_ids >= 0).sum())}
    ours = module(tensors(batch))["contrastive_loss"]
    ours.backward()

    plain = BertModel(BERT.config(VOCABULARY), add_pooling_layer=False).double()
    plain.load_state_dict(module.model.bert.state_dict())
    views = []
    for row, lengths in enumerate(GIVEN):
        at = 0
        for length in lengths:
            if length >= 8:
                text = batch.arrays["input_ids"][row, at : at + length]
                (cut,) = np.flatnonzero(text == VOCABULARY.cls)[1:]
                assert text[cut - 1] == VOCABULARY.sep == text[-1] and length // 3 <= cut <= 2 * (length // 3) + 1
                for half in (text[:cut], text[cut:]):
                    states = plain(torch.from_numpy(half)[None]).last_hidden_state[0]
                    views.append(states[0] if pooling == "cls" else states.mean(0))
            at += length
    reference = expected_loss(torch.stack(views).view(EXAMPLES, 2, -1), 0.1)
    reference.backward()
    assert float(ours.detach()) == pytest.approx(float(reference.detach()), rel=1e-6)  # ours is float32 at the end
    gradients = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
    largest = max(float(each.abs().max()) for each in gradients.values())
    for name, gradient in gradients.items():
        got = module.model.get_parameter(f"bert.{name}").grad
        assert torch.allclose(got, gradient, rtol=1e-5, atol=1e-6 * largest), name
    untrained = {name for name, weight in module.named_parameters() if weight.grad is None}
    assert untrained and all(name.startswith("model.cls.predictions") for name in untrained)


def test_short_documents_stay_whole_and_teach_nothing() -> None:
    objective = Contrastive(views="halves")
    given = rows([[5, 7]])
    batch = objective.collate(given, VOCABULARY)
    assert np.array_equal(batch.arrays["input_ids"], given.tokens) and batch.counts["examples"] == 0
    module = module_of(objective)
    sums = module(tensors(batch))
    sums["contrastive_loss"].backward()
    assert float(sums["contrastive_loss"].detach()) == 0
    assert all(torch.isfinite(each.grad).all() for each in module.parameters() if each.grad is not None)


def test_dropout_makes_two_views_of_one_text() -> None:
    objective = Contrastive(views="dropout", temperature=0.1)
    module = module_of(objective, BERT.model_copy(update={"hidden_dropout_prob": 0.1}))
    batch = tensors(objective.collate(rows(GIVEN), VOCABULARY))
    torch.manual_seed(5)
    ours = module(batch)
    torch.manual_seed(5)
    passes = [module.architecture.hidden(module.model, batch) for _ in range(2)]
    assert not torch.equal(*passes)
    views = []
    for row, lengths in enumerate(GIVEN):
        for number, length in enumerate(lengths):
            members = batch["document_ids"][row] == number
            views += [states[row][members].mean(0) for states in passes] if length >= 8 else []
    reference = expected_loss(torch.stack(views).view(EXAMPLES, 2, -1), 0.1)
    assert float(ours["contrastive_loss"].detach()) == pytest.approx(float(reference.detach()), rel=1e-6)
    module.eval()
    assert float(module(batch)["contrastive_accuracy"]) == EXAMPLES


@pytest.mark.parametrize("views", ["halves", "dropout"])
def test_micro_batches_together_have_the_gradients_of_one_batch(views: Any) -> None:
    """Compared through the loop's own function, with a micro-batch that has no example."""
    objective = Contrastive(views=views, temperature=0.1)
    module = module_of(objective, BERT.model_copy(update={"hidden_dropout_prob": 1e-12}))
    whole = module(tensors(objective.collate(rows(GIVEN), VOCABULARY)))
    whole["contrastive_loss"].backward()
    expected = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    module.zero_grad()

    class OneProcess:
        control, device = None, torch.device("cpu")

        @torch.no_grad()
        def evaluate(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return module(batch)

    parts = [slice(3, 4), slice(0, 2), slice(2, 3)]
    batches = {
        n: tensors(objective.collate(select_rows(rows(GIVEN), part), VOCABULARY)) for n, part in enumerate(parts)
    }
    loads: dict[int, Any] = {number: partial(dict, batch) for number, batch in batches.items()}
    one: Any = OneProcess()
    added = compare_examples(one, one, objective, loads)
    total = sum(sums_of_examples(each)["contrastive_loss"] for each in added.values())
    assert float(total) == pytest.approx(float(whole["contrastive_loss"].detach()), rel=1e-6)
    for number, batch in batches.items():
        module({**batch, **added[number]})["contrastive_loss"].backward()
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, gradient in expected.items():
        assert torch.allclose(module.get_parameter(name).grad, gradient, rtol=1e-5, atol=1e-6 * largest), name


def test_what_it_cannot_learn_from_is_refused_in_words() -> None:
    with pytest.raises(UserError, match='"dropout" differ by dropout, and architecture Bert has none'):
        Contrastive(views="dropout").build(BERT, VOCABULARY)
    with pytest.raises(UserError, match=r"no \[CLS\] and \[SEP\]"):
        Contrastive().check(VOCABULARY.model_copy(update={"sep": None}), sequence_length=32)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parallel": {"engine": "deepspeed", "zero_stage": 1}}, r'got "engine": "deepspeed"'),
        ({"parallel": {"tp_size": 2}}, r"got tp_size 2; set parallel.engine to \"ddp\", or to"),
        ({"cuda_graphs": True, "precision": "bf16"}, "embeds all examples in a forward without a backward"),
    ],
)
def test_what_cannot_compare_the_examples_of_all_processes_is_refused(changes: dict[str, Any], named: str) -> None:
    raw = toy.parameters(Path("store"), objective={"type": "contrastive"}, **changes)
    with pytest.raises(UserError, match=named):
        Parameters.from_dict(raw, source="test")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_store(tmp_path_factory.mktemp("train") / "data", documents=60, seed=1)


@pytest.fixture(scope="module")
def validation_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_store(tmp_path_factory.mktemp("validation") / "data", documents=60, seed=2)


def settings_of(store: Path, validation: Path, **changes: Any) -> dict[str, Any]:
    settings = toy.parameters(store, validation, max_steps=4, evaluation={"steps": 2, "batches": 2}, **changes)
    settings["architecture"] = toy.without_dropout(settings["architecture"])
    # almost plain gradient descent: with eps 1 the update is nearly proportional to the gradient
    return settings | {
        "objective": {"type": "contrastive"},
        "optimizer": {"type": "adamw", "learning_rate": 0.1, "eps": 1.0, "weight_decay": 0.0},
    }


@pytest.mark.parametrize(
    ("changes", "nodes"),
    [
        ({"micro_batch_size": 16}, (1,)),
        ({"batch_size": {"0": 7, "1": 9}, "micro_batch_size": 4}, (1, 1)),
        pytest.param({"batch_size": {"0": 7, "1": 5, "2": 4}}, (1, 1, 1), marks=pytest.mark.nightly),
        pytest.param({"parallel": {"engine": "fsdp"}, "micro_batch_size": 3}, (2,), marks=pytest.mark.nightly),
        pytest.param({"activation_checkpointing": "full"}, (1,), marks=pytest.mark.nightly),
    ],
)
def test_a_step_compares_all_its_examples_however_it_is_divided(
    changes: dict[str, Any], nodes: tuple[int, ...], store: Path, validation_store: Path, tmp_path: Path
) -> None:
    """Also micro-steps without rows, and validation."""
    toy.train(settings_of(store, validation_store), tmp_path / "one")
    toy.train(settings_of(store, validation_store, **changes), tmp_path / "other", nodes=nodes)
    one, other = toy.losses(tmp_path / "one"), toy.losses(tmp_path / "other")
    assert one.keys() == other.keys() and len(one) == 4
    for step, values in one.items():
        assert np.allclose(values, other[step], rtol=1e-5), step
    assert relative_error(weights(tmp_path / "one", 4), weights(tmp_path / "other", 4)) < 1e-5
    validated, validated_too = (toy.records(tmp_path / name, "validation") for name in ("one", "other"))
    assert validated.keys() == validated_too.keys() == {0, 2, 4}
    for step, mine in validated.items():
        assert mine["contrastive_loss"] == pytest.approx(validated_too[step]["contrastive_loss"], rel=1e-5)
        assert mine["contrastive_accuracy"] == pytest.approx(validated_too[step]["contrastive_accuracy"], abs=1e-9)
