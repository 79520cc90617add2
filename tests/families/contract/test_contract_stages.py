"""The check of `keep_stage_blocks`: stages, one after another, compute the same as the whole model, or it fails."""

from __future__ import annotations

from typing import Any

import pytest

from terakoya.plugins import registry
from terakoya_contract import architecture
from terakoya_contract.results import CheckFailed, CheckSkipped

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
def test_bundled_architectures_pass(name: str) -> None:
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
