"""Imports the checkpoints of language-pretraining's run_pretraining.py, folders with config.json and pytorch_model.bin.

An ELECTRA's folder holds generator and discriminator, which share their embeddings, as one class that Transformers
does not know; so do those of a DeBERTa with an enhanced mask decoder.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PositiveInt

from terakoya.components import Importer
from terakoya.errors import UserError
from terakoya.json_settings import read_json

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("terakoya")

PAIR = "ElectraForPretrainingModel"
MASK_DECODERS = {
    "DebertaEmdForPreTraining": "DebertaForMaskedLM",
    "DebertaV2EmdForPreTraining": "DebertaV2ForMaskedLM",
}
"""Class with an enhanced mask decoder (He et al., 2021, arXiv:2006.03654) -> the same without it, in Transformers."""
KNOWN = ("BertForPreTraining", "RobertaForMaskedLM", *MASK_DECODERS.values())
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
WORDS = "electra.embeddings.word_embeddings.weight"
LAYER = re.compile(r"electra\.encoder\.layer\.(\d+)\.")
FILES = ("pytorch_model.bin", "model.safetensors")


class LanguagePretraining(Importer):
    """A BERT, RoBERTa or DeBERTa of language-pretraining, or an ELECTRA, which becomes generator and discriminator."""

    model_classes: ClassVar[frozenset[str]] = frozenset({PAIR, *MASK_DECODERS})

    generator_heads: PositiveInt | None = None
    """Number of attention heads of an ELECTRA's generator, which its folder does not say. null: each is as wide as one
    of the discriminator, as in all entries of parameter.json."""

    def read(self, source: Path, out: Path) -> None:
        """Reads `source`, a checkpoint, or a folder of which it takes the checkpoint of most steps."""
        import transformers

        from terakoya.toolkit.formats import from_state_dict

        folder = find_checkpoint(source)
        config = read_json(folder / "config.json")
        name = next(iter(config.get("architectures") or ()), None)
        if name not in (PAIR, *MASK_DECODERS, *KNOWN):
            expected = ", ".join((PAIR, *MASK_DECODERS, *KNOWN))
            raise UserError(f"{folder / 'config.json'}: architectures: expected one of {expected}, got {name}")
        weights = read_weights(folder)
        if name == PAIR:
            self._write_pair(config, weights, folder, out)
            return
        if name in MASK_DECODERS:
            logger.warning(
                "%s: trained with an enhanced mask decoder, which Transformers does not have: hidden states stay as "
                "they were, predictions of masked tokens do not until training goes on",
                folder,
            )
            weights.pop("deberta.position_embeddings.weight", None)
        kind = getattr(transformers, MASK_DECODERS.get(name, name))
        from_state_dict.write_model(kind, kind.config_class.from_dict(config), weights, folder, out)

    def _write_pair(self, config: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path, out: Path) -> None:
        from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

        from terakoya.toolkit.formats import from_state_dict

        generator, discriminator = split_pair(weights, folder)
        narrow = {**config, **self._generator_sizes(config, generator, folder)}
        for kind, settings, part in (
            (ElectraForMaskedLM, narrow, generator),
            (ElectraForPreTraining, config, discriminator),
        ):
            below = out / ("generator" if part is generator else "discriminator")
            from_state_dict.write_model(kind, ElectraConfig.from_dict(settings), part, folder, below)

    def _generator_sizes(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path
    ) -> dict[str, int]:
        """Returns the sizes of the generator, which are those of its weights, but for the heads."""
        layers = [int(match[1]) for name in weights if (match := LAYER.match(name))]
        inner = weights.get("electra.encoder.layer.0.intermediate.dense.weight")
        if inner is None:
            raise UserError(f"{folder}: its generator has no layer")
        rows, width = inner.shape
        per_head = config["hidden_size"] // config["num_attention_heads"]
        heads = self.generator_heads or width // per_head
        if heads == 0 or width % heads:
            raise UserError(
                f"{folder}: expected the heads of its generator to be {per_head} wide, as the discriminator's, but it "
                f"is {width} wide; give their number (--generator-heads N)"
            )
        return {
            "hidden_size": width,
            "intermediate_size": rows,
            "num_hidden_layers": 1 + max(layers),
            "num_attention_heads": heads,
        }


def find_checkpoint(source: Path) -> Path:
    """Returns `source`, or in a folder of checkpoints the one of most steps.

    Raises:
        UserError: there is none, or it is a data set.
    """
    if not source.is_dir():
        raise UserError(f"{source}: no such folder")
    if (source / "dataset_info.json").is_file():
        raise UserError(
            f"{source}: is a data set of create_datasets.py, whose rows no longer say where a document ends; make a "
            "token store of the same text: terakoya prepare CORPUS --unit line --tokenizer TOKENIZER --out STORE"
        )
    steps = {int(match[1]): path for path in source.iterdir() if (match := CHECKPOINT.fullmatch(path.name))}
    folder = steps[max(steps)] if steps and not (source / "config.json").is_file() else source
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: expected a config.json or folders checkpoint-N, found neither")
    return folder


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Returns the weights by name, without running code of a pickle.

    Raises:
        UserError: there is no file of weights, or something else in it.
    """
    import torch
    from safetensors.torch import load_file

    from terakoya.toolkit.formats import restricted_unpickler

    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{folder}: expected {' or '.join(FILES)}, found neither")
    content = load_file(file) if file.suffix == ".safetensors" else restricted_unpickler.load(file)
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise UserError(f"{file}: expected weights by name")
    return {name: value for name, value in content.items() if not name.endswith(".position_ids")}  # numbers from 0


def split_pair(weights: Mapping[str, Tensor], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights of generator and discriminator, each with the embeddings, which may be there once.

    Raises:
        UserError: weights of neither, or embeddings that differ.
    """
    import torch

    from terakoya.components.copy_weights import join_names

    parts: dict[str, dict[str, Tensor]] = {"generator": {}, "discriminator": {}}
    for name, value in weights.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = value
    if len(parts) > 2:
        names = join_names([name for name in weights if not name.startswith(("generator.", "discriminator."))])
        raise UserError(f"{folder}: has weights of neither generator nor discriminator: {names}")
    shared = {
        name: value for part in parts.values() for name, value in part.items() if name.startswith("electra.embeddings.")
    }
    same = [(parts[part], name, value) for part in parts for name, value in shared.items()]
    if WORDS in shared:
        same.append((parts["generator"], "generator_lm_head.weight", shared[WORDS]))
    if different := [name for part, name, value in same if not torch.equal(part.setdefault(name, value), value)]:
        names = join_names(different)
        raise UserError(f"{folder}: expected the same embeddings in generator and discriminator, these differ: {names}")
    return parts["generator"], parts["discriminator"]
