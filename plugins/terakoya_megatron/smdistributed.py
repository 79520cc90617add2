"""Imports a GPT-J that SageMaker's model-parallel library saved whole, in a file whose name begins with `full`.

`fullmodel.pt` contains the weights under the library's own names (those of its distributed transformer) or under
Transformers' names. `user_content_fullmodel.pt` contains what the training script added: config and command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

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
"""Module of a layer in the library -> in Transformers."""

OUTSIDE = {"word_embedding": "transformer.wte", "layernorm": "transformer.ln_f", "lm_head": "lm_head"}
LAYER = re.compile(r"transformer\.seq_layers\.(\d+)\.(.+)\.(weight|bias)")
MASKS = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)|.*\.(causal_mask|mask_value)")
"""Names of attention masks, which are not weights."""

WRAPPERS = ("model", "model_state_dict", "module")
SETTINGS = {
    "n_head": ("n_head", "num_heads"),
    "n_positions": ("n_positions", "max_context_width"),
    "rotary_dim": ("rotary_dim",),
    "layer_norm_epsilon": ("layer_norm_epsilon",),
    "activation_function": ("activation_function",),
    "tie_word_embeddings": ("tie_word_embeddings",),
}
"""Settings that cannot be read from the weights: the config's name -> possible names in config and command line."""


class SmDistributed(Importer):
    """A GPT-J that was saved whole. The settings are needed if the checkpoint contains no config."""

    num_attention_heads: PositiveInt | None = None
    """Number of attention heads."""
    max_position_embeddings: PositiveInt | None = None
    """The longest row. Unit: tokens."""
    rotary_dim: PositiveInt | None = None
    """Number of dimensions of each head that rotary positions rotate."""

    def read(self, source: Path, out: Path) -> None:
        """Reads `source`, the file or a folder with one file `full*`."""
        from transformers import GPTJConfig, GPTJForCausalLM

        from terakoya.toolkit.formats import from_state_dict, restricted_unpickler

        file = find_full_model(source)
        weights = rename_weights(_find_tensors(restricted_unpickler.load(file), file), file)
        notes = file.with_name(f"user_content_{file.name}")
        settings = _read_settings(restricted_unpickler.load(notes) if notes.is_file() else {})
        given = {
            "n_head": self.num_attention_heads,
            "n_positions": self.max_position_embeddings,
            "rotary_dim": self.rotary_dim,
        }
        settings |= {name: value for name, value in given.items() if value is not None}
        missing = [key for key, name in zip(type(self).model_fields, given, strict=True) if name not in settings]
        if missing:
            raise UserError(
                f"{file}: its folder has no {notes.name} with the model's config; set {', '.join(missing)} "
                f"(--{missing[0].replace('_', '-')} N)"
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
        from_state_dict.write_model(GPTJForCausalLM, config, weights, file, out)


def find_full_model(source: Path) -> Path:
    """Returns the file of the whole model. Raises UserError if there is none or more than one."""
    if source.suffixes[-2:] == [".tar", ".gz"]:
        raise UserError(f"{source}: unpack it first (tar -xzf), and name the folder")
    if source.is_file():
        return source
    if not source.is_dir():
        raise UserError(f"{source}: no such file or folder")
    files = sorted(path for path in source.glob("full*") if path.is_file())
    if len(files) != 1:
        parts = any(source.glob("*_partial")) or (source / "newest").is_file()
        hint = "; the folder has parts of a model (`partial=True`), which only the library reads" if parts else ""
        raise UserError(f"{source}: expected one file full*, found {len(files)}{hint}")
    return files[0]


def rename_weights(weights: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Returns `weights` under Transformers' names, without masks. Raises UserError for unknown names."""
    renamed: dict[str, Tensor] = {}
    unknown = []
    for name, value in weights.items():
        module, _, end = name.rpartition(".")
        in_layer = LAYER.fullmatch(name)
        if MASKS.fullmatch(name):
            continue
        if in_layer and in_layer[2] in MODULES:
            renamed[f"transformer.h.{in_layer[1]}.{MODULES[in_layer[2]]}.{in_layer[3]}"] = value
        elif module in OUTSIDE:
            renamed[f"{OUTSIDE[module]}.{end}"] = value
        elif name.startswith(("transformer.h.", "transformer.wte.", "transformer.ln_f.")):
            renamed[name] = value
        else:
            unknown.append(name)
    if unknown:
        from terakoya.toolkit.formats.from_state_dict import join_names

        raise UserError(f"{file}: has unknown weights: {join_names(sorted(unknown))}")
    return renamed


def _find_tensors(content: Any, file: Path) -> dict[str, Tensor]:
    """Returns the weights in the file's `content`, at the top or one level below. Raises UserError without weights."""
    import torch

    for table in (content, *(content.get(key) for key in WRAPPERS if isinstance(content, dict))):
        if isinstance(table, dict) and any(isinstance(value, torch.Tensor) for value in table.values()):
            return {
                str(name).removeprefix("module."): value
                for name, value in table.items()
                if isinstance(value, torch.Tensor)
            }
    raise UserError(f"{file}: has no weights by name")


def _read_settings(notes: Any) -> dict[str, Any]:
    """Returns the settings of the config, other than sizes of weights, that the training script saved in `notes`."""
    if not isinstance(notes, dict):
        return {}
    sources = [notes.get("model_config"), notes.get("cli_args")]
    tables = [source if isinstance(source, dict) else getattr(source, "state", None) or {} for source in sources]
    settings: dict[str, Any] = {}
    for name, keys in SETTINGS.items():
        for table in tables:
            value = next((table[key] for key in keys if table.get(key) is not None), None)
            if value is not None:
                settings.setdefault(name, value)
    return settings
