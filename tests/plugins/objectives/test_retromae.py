"""RetroMAE against formulas in float64, document by document and token by token."""

from typing import Any

import numpy as np
import pytest
import torch
from test_masked_lm import VOCABULARY, rows, tensors

from terakoya.errors import UserError
from terakoya.toolkit.architectures import attention
from terakoya_plugins.architectures.bert import Bert
from terakoya_plugins.architectures.deberta_v2 import DebertaV2
from terakoya_plugins.architectures.electra import Electra
from terakoya_plugins.objectives.masked_lm import MaskedLM
from terakoya_plugins.objectives.retromae import RetroMAE
from terakoya_plugins.objectives.retromae.module import visible_positions

BERT = Bert(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, max_position_embeddings=32,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def murmur(state: int) -> int:
    state = ((state ^ state >> 16) * 0x85EBCA6B) % 2**32
    state = ((state ^ state >> 13) * 0xC2B2AE35) % 2**32
    return state ^ state >> 16


def norm(values: np.ndarray, part: Any) -> np.ndarray:
    centred = values - values.mean(-1, keepdims=True)
    weight, bias = (each.detach().numpy() for each in (part.weight, part.bias))
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + part.eps) * weight + bias


def apply(part: Any, values: np.ndarray) -> np.ndarray:
    return values @ part.weight.detach().numpy().T + part.bias.detach().numpy()


def gelu(values: np.ndarray) -> np.ndarray:
    return torch.nn.functional.gelu(torch.from_numpy(values)).numpy()


def decode(decoder: Any, cls: np.ndarray, words: np.ndarray, seen_by: list[list[int]]) -> np.ndarray:
    """The hidden states (n, H) of one document, whose token i sees the tokens `seen_by[i]`."""
    places = decoder.positions.weight.detach().numpy()[: len(words)]
    known = norm(words + places, decoder.input_norm)
    known[0] = cls
    keys, values = apply(decoder.k_proj, known), apply(decoder.v_proj, known)
    decoded = []
    for i, seen in enumerate(seen_by):
        query, heads = cls + places[i], []
        q = apply(decoder.q_proj, query)
        for head in range(4):
            part = slice(8 * head, 8 * head + 8)
            scores = np.exp([q[part] @ keys[j][part] / np.sqrt(8) for j in seen])
            heads.append(scores / scores.sum() @ values[seen][:, part])
        middle = norm(query + apply(decoder.o_proj, np.concatenate(heads)), decoder.attention_norm)
        decoded.append(
            norm(middle + apply(decoder.down_proj, gelu(apply(decoder.up_proj, middle))), decoder.output_norm)
        )
    return np.stack(decoded)


def test_the_decoders_loss_is_that_of_the_formulas_for_each_token_alone() -> None:
    objective = RetroMAE(hidden_share=0.4)
    torch.manual_seed(0)
    module: Any = objective.build(BERT, VOCABULARY).double().eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    attention.use(module, "sdpa")
    given = rows([[9, 12], [20], [5, 6, 7]])
    batch = objective.collate(given, VOCABULARY)
    sums = module(tensors(batch))
    total, count = 0.0, 0
    with torch.no_grad():
        hidden = BERT.hidden(module.model, tensors(batch)).numpy()
    keys, width = batch.arrays["decoder_keys"], given.tokens.shape[1]
    words = module.model.get_input_embeddings().weight.detach().numpy()
    for row, number in {(row, n) for row, column in np.ndindex(given.tokens.shape)
                        if (n := int(given.document_ids[row, column])) >= 0}:  # fmt: skip
        (columns,) = np.nonzero(given.document_ids[row] == number)
        drawn = [[murmur((int(keys[row]) + (i * width + j) * 0x9E3779B1) % 2**32) for j in map(int, columns)]
                 for i in map(int, columns)]  # fmt: skip
        seen_by = [
            [j for j, number in enumerate(line) if j == 0 or (i != j and number >= 0.4 * 2**32)]
            for i, line in enumerate(drawn)
        ]
        ids = given.tokens[row, columns]
        decoded = decode(module.decoder, hidden[row, columns[0]], words[ids], seen_by)
        with torch.no_grad():
            logits = BERT.logits(module.model, torch.from_numpy(decoded))
        ordinary = ids >= 5
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids).long(), reduction="none").numpy()
        total, count = total + losses[ordinary].sum(), count + ordinary.sum()
    assert count == batch.counts["reconstructed"]
    assert abs(float(sums["decoder_loss"].detach()) - total) < 1e-9 * total


def test_the_encoders_loss_is_that_of_masked_lm() -> None:
    torch.manual_seed(0)
    module: Any = RetroMAE().build(BERT, VOCABULARY)
    torch.manual_seed(0)
    plain: Any = MaskedLM(mlm_probability=0.3).build(BERT, VOCABULARY)
    given = rows([[9, 12], [20]])
    for each in (module, plain):
        attention.use(each, "sdpa")
    ours = RetroMAE().collate(given, VOCABULARY)
    assert float(module(tensors(ours))["mlm_loss"].detach()) == float(
        plain(tensors(MaskedLM(mlm_probability=0.3).collate(given, VOCABULARY)))["mlm_loss"].detach()
    )


def test_gradients_reach_cls_through_the_decoder_alone() -> None:
    """What the decoder learns moves the encoder's layers, and the last of them at [CLS] only."""
    torch.manual_seed(0)
    module: Any = RetroMAE().build(BERT, VOCABULARY)
    attention.use(module, "sdpa")
    kept: list[torch.Tensor] = []
    module.model.bert.encoder.layer[1].register_forward_hook(lambda _, __, out: kept.append(out))
    batch = RetroMAE().collate(rows([[9, 12]]), VOCABULARY)
    sums = module(tensors(batch))
    (gradient,) = torch.autograd.grad(sums["decoder_loss"], kept[0])
    assert [int(each) for each in gradient[0].abs().sum(-1).nonzero().flatten()] == [0, 9]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_share_of_hidden_tokens_is_the_one_that_is_asked_for(share: float) -> None:
    documents, positions = torch.zeros(4, 100, dtype=torch.long), torch.arange(100).expand(4, 100)
    visible = visible_positions(documents, positions, torch.tensor([1, 2, 3, 4]), hidden_share=share)[:, 0]
    assert visible[:, :, 0].all() and not visible[:, range(1, 100), range(1, 100)].any()
    others = visible[:, :, 1:].sum() / (4 * 99 * 99)
    assert abs(float(others) - (1 - share)) < 0.01
    assert share in (0.0, 1.0) or not torch.equal(visible[0], visible[1])


def test_what_it_cannot_train_is_refused_in_words() -> None:
    with pytest.raises(UserError, match="differ in width in architecture Electra: 16 and 32"):
        RetroMAE().build(Electra(hidden_size=32, embedding_size=16, num_attention_heads=4), VOCABULARY)
    with pytest.raises(UserError, match=r"no \[CLS\]"):
        RetroMAE().check(VOCABULARY.model_copy(update={"cls": None}), sequence_length=32)


def test_longer_rows_than_the_decoder_has_positions_are_refused_in_words() -> None:
    """Relative positions have no bound, so an architecture that has these alone refuses no row."""
    architecture = DebertaV2(hidden_size=16, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16)
    objective = RetroMAE()
    batch = tensors(objective.collate(rows([[9, 12]]), VOCABULARY))
    with pytest.raises(UserError, match=r"learns 16 positions.*rows have 24; set architecture.max_position_emb"):
        objective.build(architecture, VOCABULARY)(batch)
