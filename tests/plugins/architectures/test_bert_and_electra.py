"""BERT and ELECTRA are Transformers' own, with the published sizes."""

from fractions import Fraction
from typing import Any

import pytest
import transformers

from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya_plugins.architectures.bert import Bert
from terakoya_plugins.architectures.electra import Electra

VOCABULARY = Vocabulary(size=30522, pad=0, unk=1, cls=2, sep=3, mask=4, special=(0, 1, 2, 3, 4))
BASE = Electra(
    embedding_size=768, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072
)
HEADS = {
    Bert: {"masked": "BertForMaskedLM", "pretraining": "BertForPreTraining", "body": "BertModel"},
    Electra: {"masked": "ElectraForMaskedLM", "discriminator": "ElectraForPreTraining", "body": "ElectraModel"},
}


@pytest.mark.parametrize("kind", HEADS)
def test_defaults_are_those_of_the_config(kind: Any) -> None:
    theirs = getattr(transformers, kind.config_class)()
    assert kind().config(Vocabulary(size=theirs.vocab_size, pad=0)).to_dict() == theirs.to_dict()


@pytest.mark.parametrize("kind", HEADS)
def test_each_head_is_its_class(kind: Any) -> None:
    small = kind(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    assert set(HEADS[kind]) == kind.heads
    for head, expected in HEADS[kind].items():
        model = small.build(VOCABULARY, head)
        assert type(model).__name__ == expected and len(small.blocks(model)) == 1
        assert model.config.pad_token_id == 0


def test_a_third_of_base_keeps_depth_and_embeddings() -> None:
    small = BASE.scale_width(Fraction(1, 3))
    assert (small.hidden_size, small.num_attention_heads, small.intermediate_size) == (256, 4, 1024)
    assert (small.num_hidden_layers, small.embedding_size) == (12, 768)
    assert BASE.scale_width(Fraction("1/1")) == BASE
    with pytest.raises(UserError, match="1/5 of hidden_size 768 is not a whole number; use one of 1/2, 1/3, 1/4"):
        BASE.scale_width(Fraction(1, 5))
