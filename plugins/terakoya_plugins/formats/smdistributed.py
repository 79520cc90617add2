"""SageMaker's model-parallel library: the whole model it saves under a name with `full`, of a GPT-J.

`fullmodel.pt` holds the weights, by the library's own names (a distributed transformer's) or translated already to
Transformers'; `user_content_fullmodel.pt` beside it holds what the training script added: config and command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from terakoya import hookimpl
from terakoya.components import Importer
from terakoya.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

MODULES = {
    "pre_layernorm": "ln_1",
    "attention.query": "attn.q_proj",
    "attention.key": "attn.k_proj",
    "attention.value": "attn.v_proj",
    "attention.dense": "attn.out_proj",
    "output.dense1": "mlp.fc_in",
    "output.dense2": "mlp.fc_out",
}
"""Modules of a layer, here and in Transformers."""

OUTSIDE = {"word_embedding": "transformer.wte", "layernorm": "transformer.ln_f", "lm_head": "lm_head"}
LAYER = re.compile(r"transformer\.seq_layers\.(\d+)\.(.+)\.(weight|bias)")
MASKS = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)|.*\.(causal_mask|mask_value)")
"""Attention masks, which are no weights."""

WRAPPERS = ("model", "model_state_dict", "module")
SETTINGS = {
    "n_head": ("n_head", "num_heads"),
    "n_positions": ("n_positions", "max_context_width"),
    "rotary_dim": ("rotary_dim",),
    "layer_norm_epsilon": ("layer_norm_epsilon",),
    "activation_function": ("activation_function",),
    "tie_word_embeddings": ("tie_word_embeddings",),
}
"""What weights do not tell: the config's names, and those of the training script's options."""


class SmDistributed(Importer):
    """A GPT-J that was saved whole.

    Attributes:
        num_attention_heads: needed where the checkpoint holds no config.
        max_position_embeddings: the longest row; as before.
        rotary_dim: how much of each head is turned by its position.
    """

    num_attention_heads: PositiveInt | None = None
    max_position_embeddings: PositiveInt | None = None
    rotary_dim: PositiveInt | None = None

    def read(self, source: Path, out: Path) -> None:
        """Reads `source`, the file or a folder with one file `full*`, and writes a Transformers folder to `out`.

        Raises:
            UserError: no such file, a part of a model, a weight without a place, or settings that are not known.
        """
        from transformers import GPTJConfig, GPTJForCausalLM

        from terakoya.toolkit.formats import from_state_dict as foreign_model
        from terakoya.toolkit.formats import restricted_unpickler as pickled

        file = find_full(source)
        weights = translate(_tensors(pickled.load(file), file), file)
        notes = file.with_name(f"user_content_{file.name}")
        settings = _settings(pickled.load(notes) if notes.is_file() else {})
        own = {
            "n_head": self.num_attention_heads,
            "n_positions": self.max_position_embeddings,
            "rotary_dim": self.rotary_dim,
        }
        settings |= {name: value for name, value in own.items() if value is not None}
        lacking = [key for key, name in zip(type(self).model_fields, own, strict=True) if name not in settings]
        if lacking:
            raise UserError(
                f"{file}: {notes.name} with the model's config is not beside it; say {', '.join(lacking)} "
                f"(--{lacking[0].replace('_', '-')} N)"
            )
        words, inner = weights.get("transformer.wte.weight"), weights.get("transformer.h.0.mlp.fc_in.weight")
        if words is None or inner is None:
            raise UserError(f"{file}: has no {'word embeddings' if words is None else 'first layer'}")
        layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("transformer.h."))
        config = GPTJConfig(
            vocab_size=words.shape[0],
            n_embd=words.shape[1],
            n_layer=layers,
            n_inner=None if len(inner) == 4 * words.shape[1] else len(inner),
            bos_token_id=None,
            eos_token_id=None,
            **settings,
        )
        foreign_model.write(GPTJForCausalLM, config, weights, file, out)


def find_full(source: Path) -> Path:
    """The file of the whole model. UserError if there is none, or several."""
    if source.suffixes[-2:] == [".tar", ".gz"]:
        raise UserError(f"{source}: unpack it first (tar -xzf), and name the folder")
    if source.is_file():
        return source
    if not source.is_dir():
        raise UserError(f"{source}: no such file or folder")
    found = sorted(path for path in source.glob("full*") if path.is_file())
    if len(found) != 1:
        parts = any(source.glob("*_partial")) or (source / "newest").is_file()
        hint = "; what lies there are parts (`partial=True`), which only that library reads" if parts else ""
        raise UserError(f"{source}: expected one file full*, found {len(found)}{hint}")
    return found[0]


def translate(weights: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
    """`weights` by Transformers' names. UserError for names that are not known."""
    found: dict[str, Tensor] = {}
    unknown = []
    for name, value in weights.items():
        module, _, end = name.rpartition(".")
        inside = LAYER.fullmatch(name)
        if MASKS.fullmatch(name):
            continue
        if inside and inside[2] in MODULES:
            found[f"transformer.h.{inside[1]}.{MODULES[inside[2]]}.{inside[3]}"] = value
        elif module in OUTSIDE:
            found[f"{OUTSIDE[module]}.{end}"] = value
        elif name.startswith(("transformer.h.", "transformer.wte.", "transformer.ln_f.")):
            found[name] = value
        else:
            unknown.append(name)
    if unknown:
        from terakoya.toolkit.formats.from_state_dict import listed

        raise UserError(f"{file}: has weights that are not known: {listed(sorted(unknown))}")
    return found


def _tensors(content: Any, file: Path) -> dict[str, Tensor]:
    """The weights in what the file holds: by name, or one level below. UserError if there are none."""
    import torch

    for table in (content, *(content.get(key) for key in WRAPPERS if isinstance(content, dict))):
        if isinstance(table, dict) and any(isinstance(value, torch.Tensor) for value in table.values()):
            return {
                str(name).removeprefix("module."): value
                for name, value in table.items()
                if isinstance(value, torch.Tensor)
            }
    raise UserError(f"{file}: holds no weights by name")


def _settings(notes: Any) -> dict[str, Any]:
    """The config's settings that weights do not tell, as far as the training script noted them."""
    if not isinstance(notes, dict):
        return {}
    sources = [notes.get("model_config"), notes.get("cli_args")]
    tables = [each if isinstance(each, dict) else getattr(each, "state", None) or {} for each in sources]
    found: dict[str, Any] = {}
    for name, keys in SETTINGS.items():
        for table in tables:
            value = next((table[key] for key in keys if table.get(key) is not None), None)
            if value is not None:
                found.setdefault(name, value)
    return found


@hookimpl
def register_importers() -> dict[str, type[Importer]]:
    """Offers `smdistributed`."""
    return {"smdistributed": SmDistributed}
