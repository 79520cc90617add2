"""Masked language modelling against plain Transformers."""

import numpy as np
import pytest
import torch
from packed_rows import VOCABULARY, rows, tensors
from pydantic import ValidationError
from transformers import BertForMaskedLM

from terakoya.components.rows import Rows
from terakoya.errors import UserError
from terakoya.toolkit.architectures import attention
from terakoya_plugins.architectures.bert import Bert
from terakoya_plugins.objectives.masked_lm import MaskedLM

BERT = Bert(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, max_position_embeddings=32,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def test_loss_and_gradients_equal_those_of_transformers_on_separate_documents() -> None:
    objective = MaskedLM(mlm_probability=0.3)
    torch.manual_seed(0)
    module = objective.build(BERT, VOCABULARY)
    attention.use(module, "sdpa")
    batch = objective.collate(rows([[9, 12], [20], [5, 6, 7]]), VOCABULARY)
    ours = module(tensors(batch))["mlm_loss"]
    ours.backward()

    reference = BertForMaskedLM(BERT.config(VOCABULARY))
    reference.load_state_dict(module.model.state_dict())
    labels = np.full(batch.arrays["input_ids"].size, -100)
    used = batch.arrays["masked_labels"] >= 0
    labels[batch.arrays["masked_positions"][used]] = batch.arrays["masked_labels"][used]
    labels = labels.reshape(batch.arrays["input_ids"].shape)
    total = torch.zeros(())
    for row in range(len(labels)):
        for number in range(batch.arrays["document_ids"][row].max() + 1):
            columns = batch.arrays["document_ids"][row] == number
            ids = torch.from_numpy(batch.arrays["input_ids"][row][columns])[None]
            targets = torch.from_numpy(labels[row][columns])[None]
            if (targets >= 0).any():
                total = total + reference(ids, labels=targets).loss * (targets >= 0).sum()
    total.backward()
    assert batch.counts["masked"] == used.sum() > 5
    assert abs(float(ours.detach()) - float(total.detach())) / float(total.detach()) < 1e-6
    for (name, mine), theirs in zip(module.model.named_parameters(), reference.parameters(), strict=True):
        difference = (mine.grad - theirs.grad).norm() / (theirs.grad.norm() + 1e-12)
        assert difference < 1e-4 or (mine.grad - theirs.grad).abs().max() < 1e-6, name


def test_unused_slots_add_nothing() -> None:
    objective = MaskedLM()
    torch.manual_seed(0)
    module = objective.build(BERT, VOCABULARY).eval()
    attention.use(module, "sdpa")
    batch = tensors(objective.collate(rows([[9], [20]]), VOCABULARY))
    more = {
        **batch,
        "masked_positions": torch.cat([batch["masked_positions"], torch.zeros(7, dtype=torch.int64)]),
        "masked_labels": torch.cat([batch["masked_labels"], torch.full((7,), -100)]),
    }
    with torch.no_grad():
        few, many = module(batch), module(more)
    assert abs(float(few["mlm_loss"]) - float(many["mlm_loss"])) < 1e-5
    assert float(few["masked_accuracy"]) == float(many["masked_accuracy"])


def test_the_next_sentence_loss_equals_that_of_transformers() -> None:
    from transformers import BertForPreTraining

    objective = MaskedLM(layout="pairs", next_sentence=True)
    torch.manual_seed(0)
    module = objective.build(BERT, VOCABULARY)
    attention.use(module, "eager")
    one = rows([[20], [17]], width=20)
    types = (np.arange(20)[None] > 9).astype(np.int32) * (one.document_ids >= 0)
    paired = Rows(
        tokens=one.tokens, document_ids=one.document_ids, position_ids=one.position_ids, word_starts=one.word_starts,
        keys=one.keys, token_type_ids=types, next_sentence=np.array([0, 1], np.int8),
    )  # fmt: skip
    batch = objective.collate(paired, VOCABULARY)
    sums = module(tensors(batch))
    reference = BertForPreTraining(BERT.config(VOCABULARY))
    reference.load_state_dict(module.model.state_dict())
    labels = torch.full((2 * 20,), -100)
    used = batch.arrays["masked_labels"] >= 0
    labels[batch.arrays["masked_positions"][used]] = torch.from_numpy(batch.arrays["masked_labels"][used])
    loss = reference(
        torch.from_numpy(batch.arrays["input_ids"]), attention_mask=torch.from_numpy(one.document_ids >= 0).long(),
        token_type_ids=torch.from_numpy(types).long(), labels=labels.view(2, 20),
        next_sentence_label=torch.tensor([0, 1]),
    ).loss  # fmt: skip
    ours = sums["mlm_loss"] / batch.counts["masked"] + sums["nsp_loss"] / batch.counts["rows"]
    assert abs(float(ours.detach()) - float(loss.detach())) < 1e-5


def test_the_head_runs_at_masked_positions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = MaskedLM()
    module = objective.build(BERT, VOCABULARY)
    attention.use(module, "sdpa")
    batch = objective.collate(rows([[20], [20]]), VOCABULARY)
    seen = []
    monkeypatch.setattr(
        Bert, "logits", lambda self, model, hidden: seen.append(hidden.shape) or model.cls.predictions(hidden)
    )
    module(tensors(batch))
    assert seen == [(len(batch.arrays["masked_positions"]), 32)]
    assert len(batch.arrays["masked_positions"]) <= 0.2 * batch.arrays["input_ids"].size


def test_conflicting_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="need each other"):
        MaskedLM(next_sentence=True)
    with pytest.raises(ValidationError, match="add up to more than 1"):
        MaskedLM(replace_probability=0.8, random_probability=0.3)


def test_stores_that_cannot_be_masked_are_refused() -> None:
    one = rows([[9]])
    without = Rows(
        tokens=one.tokens, document_ids=one.document_ids, position_ids=one.position_ids, word_starts=None,
        keys=one.keys, token_type_ids=None, next_sentence=None,
    )  # fmt: skip
    with pytest.raises(UserError, match="needs word starts"):
        MaskedLM().collate(without, VOCABULARY)
    assert MaskedLM(whole_word_mask=False).collate(without, VOCABULARY).counts["masked"] > 0
    with pytest.raises(UserError, match=r"no \[MASK\]"):
        MaskedLM().collate(one, VOCABULARY.model_copy(update={"mask": None}))
