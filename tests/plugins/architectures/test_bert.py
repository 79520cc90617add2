"""BERT is Transformers' BERT, with the published sizes."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining, BertModel

from terakoya.components.vocabulary import Vocabulary
from terakoya_plugins.architectures.bert import Bert

VOCABULARY = Vocabulary(size=30522, pad=0, unk=1, cls=2, sep=3, mask=4, special=(0, 1, 2, 3, 4))


def parameters(architecture: Bert, head: str) -> int:
    with torch.device("meta"):
        model = architecture.build(VOCABULARY, head)  # type: ignore[arg-type]
    return sum(parameter.numel() for parameter in model.parameters())


def test_defaults_are_those_of_bert_config() -> None:
    theirs = BertConfig()
    ours = Bert().config(Vocabulary(size=theirs.vocab_size, pad=0))
    assert ours.to_dict() == theirs.to_dict()


@pytest.mark.parametrize(
    ("architecture", "published"),
    [
        (Bert(), 109_482_240),  # BERT-base: 110 M
        (Bert(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096), 335_141_888),
    ],
)
def test_the_published_sizes(architecture: Bert, published: int) -> None:
    """The body with its pooler over the English vocabulary of 30,522; Devlin et al. report 110 M and 340 M."""
    assert parameters(architecture, "body") == published


def test_each_head_is_its_class() -> None:
    small = Bert(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    classes = {"masked": BertForMaskedLM, "pretraining": BertForPreTraining, "body": BertModel}
    assert set(classes) == Bert.heads
    for head, expected in classes.items():
        model = small.build(VOCABULARY, head)  # type: ignore[arg-type]
        assert type(model) is expected and len(small.blocks(model)) == 1
        assert model.config.pad_token_id == 0
