"""Two threads that divide a vocabulary of an odd size compute the embeddings, logits and gradients of one."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from terakoya_contract.partition import ThreadGroup, ThreadSum
from terakoya_parallel.tensor_division import divide_vocabulary
from terakoya_parallel.tensor_layers import TensorDivision
from terakoya_parallel.tensor_part import TensorPart

ODD = 67
SIZES = {
    "vocab_size": ODD, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip


def make(kind: str) -> PreTrainedModel:
    """BERT, with a bias for each id, or a Llama whose padding id is in the second part, also with an adapter over its
    head."""
    torch.manual_seed(0)
    if kind == "tied":
        return BertForMaskedLM(BertConfig(**SIZES, pad_token_id=0)).eval()
    model = LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=ODD - 1, tie_word_embeddings=False)).eval()
    if kind == "adapted":
        peft = pytest.importorskip("peft")
        chosen = peft.LoraConfig(r=3, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
        peft.inject_adapter_in_model(chosen, model)
    return model


def gradients(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits of all ids of the vocabulary, and the gradients by name."""
    logits = model(input_ids=torch.arange(ODD)[None], attention_mask=torch.ones(1, ODD)).logits
    (logits * torch.linspace(-1, 1, ODD)).square().sum().backward()
    return logits.detach(), {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("kind", ["tied", "untied", "adapted"])
def test_parts_of_an_odd_vocabulary_compute_what_the_whole_does(kind: str) -> None:
    model, tied = make(kind), kind == "tied"
    copies = [copy.deepcopy(model) for _ in range(2)]
    weights = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    assert (weights[0] is weights[1]) == tied
    logits, expected = gradients(model)
    thread_sum = ThreadSum()

    def work(index: int) -> tuple[Tensor, dict[str, Tensor], dict[str, TensorPart]]:
        own = copies[index]
        with torch.enable_grad():
            division = TensorDivision()
            divide_vocabulary(own, [own], ThreadGroup(index, 2, thread_sum), division)
            by_name = {name: division.parts[each] for name, each in own.named_parameters() if each in division.parts}
            return *gradients(own), by_name

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, range(2)))
    for own, (found_logits, found, parts) in zip(copies, results, strict=True):
        torch.testing.assert_close(found_logits, logits)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            wanted = parts[name].cut(expected[name]) if name in parts else expected[name]
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)
        words, head = own.get_input_embeddings(), own.get_output_embeddings()
        assert isinstance(words, nn.Embedding) and (words.weight is head.weight) == tied
    sizes = [{part.local_shape[0] for part in parts.values()} for _, _, parts in results]
    assert sizes == [{34}, {33}]
