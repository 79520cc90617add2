"""Checks of architectures and initializers fail, with their reason, where what they hold is broken."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from terakoya.components import Architecture, Initializer, TensorPartition, VocabularyChange
from terakoya.plugins import registry
from terakoya.toolkit.formats import transformers_folder
from terakoya.training.model import mup
from terakoya_contract import architecture
from terakoya_contract.architecture import ArchitectureCase
from terakoya_contract.coordinates import check_coordinates
from terakoya_contract.exporting import check_long_texts
from terakoya_contract.initializer import check_weights
from terakoya_contract.results import CheckFailed, CheckSkipped
from terakoya_contract.settings import Case
from terakoya_plugins.architectures.electra import Electra
from terakoya_plugins.architectures.gemma3_text import Gemma3Text
from terakoya_plugins.architectures.llama import Llama

# ------------------------------------------------------------------------------------------------------- output layers


def case(name: str, **changes: Any) -> architecture.ArchitectureCase:
    """The case of a bundled architecture, with other class attributes."""
    bundled = registry().component("architectures", name)
    fields = {"__annotations__": {key: ClassVar for key in changes}, "__module__": __name__}
    component = type("Changed", (bundled,), {**changes, **fields}) if changes else bundled
    return architecture.ArchitectureCase("architectures", name, component)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama", "qwen3", "modernbert", "t5"])
def test_bundled_architectures_pass(name: str) -> None:
    architecture.check_output_layers(case(name))


@pytest.mark.parametrize(
    ("name", "layers", "message"),
    [
        ("llama", ("o_proj",), "changes its hidden states by"),
        ("llama", ("out",), "no layer named out"),
        ("bert", ("dense",), "changes its hidden states by"),
    ],
)
def test_wrong_layers_fail(name: str, layers: tuple[str, ...], message: str) -> None:
    with pytest.raises(CheckFailed, match=message):
        architecture.check_output_layers(case(name, output_layers=layers))


def test_a_family_without_them_is_skipped() -> None:
    with pytest.raises(CheckSkipped):
        architecture.check_output_layers(case("bert"))


# -------------------------------------------------------------------------------------------------------------- stages

CUT = ("gpt2", "gptj", "llama", "qwen3", "modernbert_decoder")


def gpt2(*, left: str) -> architecture.ArchitectureCase:
    """gpt2 with a `keep_stage_blocks` that leaves the attribute `left` of the body in every stage; "all" leaves
    everything."""

    class Changed(registry().component("architectures", "gpt2")):  # type: ignore[misc]
        """gpt2 with another `keep_stage_blocks`."""

        def keep_stage_blocks(self, model: Any, stage: range) -> None:
            """Cuts `model`, then puts the attribute back."""
            if left != "all":
                before = getattr(model.base_model, left)
                super().keep_stage_blocks(model, stage)
                setattr(model.base_model, left, before)

    return architecture.ArchitectureCase("architectures", "gpt2", Changed)


@pytest.mark.parametrize("name", CUT)
def test_stages_bundled_architectures_pass(name: str) -> None:
    architecture.check_pipeline_stages(
        architecture.ArchitectureCase("architectures", name, registry().component("architectures", name))
    )


@pytest.mark.parametrize(
    ("left", "message"),
    [
        ("wpe", "add nothing that the first stage has added"),
        ("ln_f", "it must end without the final norm"),
        ("h", "had to keep 1 of the blocks, but blocks returns 2"),
        ("all", "had to keep 1 of the blocks, but blocks returns 2"),
    ],
)
def test_a_wrong_keep_stage_blocks_fails(left: str, message: str) -> None:
    with pytest.raises(CheckFailed, match=message):
        architecture.check_pipeline_stages(gpt2(left=left))


def test_a_stage_that_does_not_say_where_its_embeddings_are_fails() -> None:
    class Removed(registry().component("architectures", "gpt2")):  # type: ignore[misc]
        """gpt2 without a module in the place of embeddings that a stage does not have."""

        def keep_stage_blocks(self, model: Any, stage: range) -> None:
            """Cuts `model`, and takes out what replaces its embeddings."""
            super().keep_stage_blocks(model, stage)
            if stage.start > 0:
                del model.base_model.wte

    with pytest.raises(CheckFailed, match=r"stage 2 of 2 does not say where .* which parallel\.tp_size asks .* 'wte'"):
        architecture.check_pipeline_stages(architecture.ArchitectureCase("architectures", "gpt2", Removed))


def test_an_architecture_without_keep_stage_blocks_is_skipped() -> None:
    with pytest.raises(CheckSkipped, match=r"parallel\.pp_size is refused"):
        architecture.check_pipeline_stages(
            architecture.ArchitectureCase("architectures", "bert", registry().component("architectures", "bert"))
        )


# ----------------------------------------------------------------------------------------------------------- partition

PARTITION_CUT = (
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


@pytest.mark.parametrize("name", PARTITION_CUT)
def test_partition_bundled_architectures_pass(name: str) -> None:
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


# --------------------------------------------------------------------------------------------------------- coordinates

FAMILIES = ("bert", "electra", "modernbert", "llama")


def check(component: type[Architecture]) -> None:
    check_coordinates(ArchitectureCase("architectures", component.__name__, component))


@pytest.mark.parametrize("name", FAMILIES)
def test_usual_initial_values_and_rates_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scales the logits of a model with four times the width change several times as much."""

    def unscaled(module: nn.Module, *others: Any) -> Mapping[str, mup.Scale]:
        return {key: mup.Scale(1.0, 1.0) for key, _ in module.named_parameters()}

    monkeypatch.setattr(mup, "compare", unscaled)
    with pytest.raises(CheckFailed, match=r"have changed \d+(\.\d+)? times as much at hidden_size"):
        check(registry().component("architectures", name))


@pytest.mark.parametrize("left_out", ["initial", "rate"])
def test_initial_values_or_rates_alone_fail(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = mup.compare

    def half(module: nn.Module, wider: nn.Module, ratio: float, norms: Collection[nn.Module]) -> dict[str, mup.Scale]:
        found = compare(module, wider, ratio, norms)
        return {name: mup.Scale(**{**vars(each), left_out: 1.0}) for name, each in found.items()}

    monkeypatch.setattr(mup, "compare", half)
    with pytest.raises(CheckFailed):
        check(Llama)


def test_a_tied_head_needs_the_norm_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terakoya_contract.coordinates.norm_before_tied_head", lambda model, blocks: None)
    with pytest.raises(CheckFailed, match="the logits have changed"):
        check(registry().component("architectures", "bert"))


def test_a_norm_with_a_number_of_its_own_fails() -> None:
    """Gemma's norms multiply by 1 + weight, so that a smaller weight makes nothing smaller."""

    class Claims(Gemma3Text):
        mup_widths = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")

    with pytest.raises(CheckFailed, match="multiply embeddings, logits or norms by a number of its own"):
        check(Claims)


def test_widths_are_names_of_fields() -> None:
    for wrong in (("hidden_size", "embedding_width"), ("embedding_size",)):
        with pytest.raises(CheckFailed, match="expected names of its fields, hidden_size among them"):
            check(type("Wrong", (Electra,), {"mup_widths": wrong}))
    with pytest.raises(CheckSkipped, match="the key mup is refused"):
        check(type("Without", (Electra,), {"mup_widths": ()}))


# --------------------------------------------------------------------------------------------------------- initializer

numbers = itertools.count(1)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (lambda change: [{0: 1.0}], "returned 1 mappings, expected one for each of 5 ids"),
        (lambda change: [{99: 1.0}] * 5, "weighs id 99, which the old vocabulary does not have"),
        (lambda change: [{0: 1.5, 1: -0.5}] * 5, "expected positive numbers"),
        (lambda change: [{0: 0.5, 1: 0.6}] * 5, "have the sum 1.1, expected at most 1"),
        (lambda change: [{next(numbers) % 9: 1.0} for _ in change.missing], "called again"),
    ],
)
def test_a_broken_initializer_fails(
    weights: Callable[[VocabularyChange], list[Mapping[int, float]]], reason: str
) -> None:
    class Broken(Initializer):
        """A broken one."""

        def weights(self, change: VocabularyChange) -> list[Mapping[int, float]]:
            return weights(change)

    with pytest.raises(CheckFailed, match=reason):
        check_weights(Case("initializers", "broken", Broken))


# ---------------------------------------------------------------------------------------------------------- long texts


def test_texts_that_are_cut_to_more_than_the_model_accepts_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ArchitectureCase("architectures", "bert", registry().component("architectures", "bert"))
    check_long_texts(case)
    monkeypatch.setattr(transformers_folder, "longest_input", lambda model: 100)
    with pytest.raises(CheckFailed, match=r"10,000 characters to 100 tokens, which the model does not accept"):
        check_long_texts(case)
