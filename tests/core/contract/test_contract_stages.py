"""What `cut` says is tried: stages one after another compute what the whole does, or it is told why not."""

from __future__ import annotations

from typing import Any

import pytest

from terakoya.contract import architecture
from terakoya.contract.findings import NotLookedAt, Wrong
from terakoya.plugins import registry

CUT = ("gpt2", "gptj", "llama", "qwen3")


def gpt2(*, left: str) -> architecture.Subject:
    """gpt2, of whose body every stage has `left` what the whole has under that name; "all" is everything."""

    class Changed(registry().component("architectures", "gpt2")):  # type: ignore[misc]
        """With another cut."""

        def cut(self, model: Any, kept: range) -> None:
            """Changed."""
            if left != "all":
                before = getattr(model.base_model, left)
                super().cut(model, kept)
                setattr(model.base_model, left, before)

    return architecture.Subject("architectures", "gpt2", Changed)


@pytest.mark.parametrize("name", CUT)
def test_what_comes_with_terakoya_is_kept(name: str) -> None:
    architecture.staged(architecture.Subject("architectures", name, registry().component("architectures", name)))


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ("wpe", "add nothing to it that the first has added"),
        ("ln_f", "it must end without the final norm"),
        ("h", "was to keep 1 of the blocks, but blocks gives 2"),
        ("all", "was to keep 1 of the blocks, but blocks gives 2"),
    ],
)
def test_a_wrong_cut_is_told(left: str, said: str) -> None:
    with pytest.raises(Wrong, match=said):
        architecture.staged(gpt2(left=left))


def test_what_cannot_be_cut_is_not_looked_at() -> None:
    with pytest.raises(NotLookedAt, match=r"parallel\.pp_size is refused"):
        architecture.staged(
            architecture.Subject("architectures", "bert", registry().component("architectures", "bert"))
        )
