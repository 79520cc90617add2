"""What `tensor_partition` says is tried: threads that share a model's blocks compute what one does, or it is told why
not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from terakoya.components import TensorPartition
from terakoya.contract import architecture
from terakoya.contract.findings import Wrong
from terakoya.plugins import registry

CUT = ("bert", "gpt2", "gptj", "llama", "qwen3")


def subject(name: str, **changes: Any) -> architecture.Subject:
    """The architecture `name`, its partition with `changes`."""

    class Changed(registry().component("architectures", name)):  # type: ignore[misc]
        """With another partition."""

        def tensor_partition(self) -> TensorPartition | None:
            """Changed."""
            found = super().tensor_partition()
            return replace(found, **{key: value(getattr(found, key)) for key, value in changes.items()})

    return architecture.Subject("architectures", name, Changed)


@pytest.mark.parametrize("name", CUT)
def test_what_comes_with_terakoya_is_kept(name: str) -> None:
    architecture.shared(subject(name))


BROKEN = {
    "a norm of heads forgotten": ("qwen3", {"on_parts": lambda _: ()}, r"gradient of .*[qk]_norm.weight is not"),
    "a fused layer cut as one": ("gpt2", {"columns": lambda _: {"attn.c_attn": 1, "mlp.c_fc": 1}}, "are off by"),
    "an entry forgotten": ("llama", {"entries": lambda _: ("self_attn",)}, "gradient of .* is not that of one process"),
    "a name that is not there": ("bert", {"rows": lambda old: (*old, "mlp")}, "its blocks have no mlp; they have att"),
    "a layer that is not linear": ("bert", {"rows": lambda old: (*old, "output.LayerNorm")}, "is a LayerNorm; only"),
    "rows left out": ("gptj", {"rows": lambda _: ("attn.out_proj",)}, "shapes cannot be multiplied"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_wrong_partition_is_told(broken: str) -> None:
    name, changes, said = BROKEN[broken]
    with pytest.raises((Wrong, RuntimeError), match=said):
        architecture.shared(subject(name, **changes))
