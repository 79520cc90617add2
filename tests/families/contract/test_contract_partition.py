"""The check of `tensor_partition`: threads that share a model's blocks compute the same as one, or the check fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from terakoya.components import TensorPartition
from terakoya.plugins import registry
from terakoya_contract import architecture
from terakoya_contract.results import CheckFailed

CUT = (
    "bert", "electra", "eurobert", "gemma3_text", "gpt2", "gptj", "llama", "mistral", "modernbert_decoder", "qwen3",
    "roberta",
)  # fmt: skip


def make_case(name: str, **changes: Any) -> architecture.ArchitectureCase:
    """The architecture `name` with `changes` to its partition."""

    class Changed(registry().component("architectures", name)):  # type: ignore[misc]
        """The architecture with another partition."""

        def tensor_partition(self) -> TensorPartition | None:
            """The changed partition."""
            partition = super().tensor_partition()
            return replace(partition, **{key: value(getattr(partition, key)) for key, value in changes.items()})

    return architecture.ArchitectureCase("architectures", name, Changed)


@pytest.mark.parametrize("name", CUT)
def test_bundled_architectures_pass(name: str) -> None:
    architecture.check_tensor_partition(make_case(name))


BROKEN = {
    "a norm of heads forgotten": ("qwen3", {"local": lambda _: ()}, r"gradient of .*[qk]_norm.weight in 2 .* is not"),
    "a fused layer cut as one": (
        "gpt2",
        {"column_parallel": lambda _: {"attn.c_attn": 1, "mlp.c_fc": 1}},
        "are off by",
    ),
    "a forgotten entry": ("llama", {"inputs": lambda _: ("self_attn",)}, "gradient of .* is not that of one process"),
    "an unknown name": ("bert", {"row_parallel": lambda old: (*old, "mlp")}, "its blocks have no mlp; they have att"),
    "a layer that is not linear": (
        "bert",
        {"row_parallel": lambda old: (*old, "output.LayerNorm")},
        "is a LayerNorm; only",
    ),
    "rows left out": ("gptj", {"row_parallel": lambda _: ("attn.out_proj",)}, "shapes cannot be multiplied"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_wrong_partition_fails(broken: str) -> None:
    name, changes, message = BROKEN[broken]
    with pytest.raises((CheckFailed, RuntimeError), match=message):
        architecture.check_tensor_partition(make_case(name, **changes))


def test_a_head_that_is_not_called_is_not_divided() -> None:
    """Its logits are those of a part of the vocabulary; with `vocabulary` False every process has the whole head."""

    def case_of(*, vocabulary: bool) -> architecture.ArchitectureCase:
        made = make_case("llama", vocabulary=lambda _: vocabulary)

        class Uncalled(made.component):  # type: ignore[name-defined, misc]
            """Llama with a product of its own."""

            def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
                """The logits (..., V)."""
                return hidden @ model.lm_head.weight.T

        return architecture.ArchitectureCase("architectures", "llama", Uncalled)

    with pytest.raises(CheckFailed, match=r"logits of 2 processes .* set vocabulary to False"):
        architecture.check_tensor_partition(case_of(vocabulary=True))
    architecture.check_tensor_partition(case_of(vocabulary=False))


def test_blocks_that_read_several_positions_do_not_divide_them() -> None:
    """A block that adds the position before: its processes compute something else, unless `positions` is False."""

    def case_of(*, positions: bool) -> architecture.ArchitectureCase:
        made = make_case("llama", positions=lambda _: positions)

        class Shifting(made.component):  # type: ignore[name-defined, misc]
            """Llama with something like a convolution before its feed-forward."""

            def build(self, *arguments: Any) -> PreTrainedModel:
                """The model."""
                model = super().build(*arguments)
                for block in self.blocks(model):
                    block.post_attention_layernorm.register_forward_hook(
                        lambda _, given, normed: normed + torch.nn.functional.pad(normed, (0, 0, 1, 0))[:, :-1]
                    )
                return model

        return architecture.ArchitectureCase("architectures", "llama", Shifting)

    with pytest.raises(CheckFailed, match=r"2 processes that share positions, too, .* set positions to False"):
        architecture.check_tensor_partition(case_of(positions=True))
    architecture.check_tensor_partition(case_of(positions=False))
