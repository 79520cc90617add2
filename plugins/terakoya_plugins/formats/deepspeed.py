"""DeepSpeed's ZeRO checkpoints, stages 1 to 3, of a Transformers model: its float32 master weights.

`*_zero_pp_rank_N_mp_rank_00_optim_states.pt` holds process N's share of all trained weights, flattened one behind the
other; `mp_rank_00_model_states.pt` (stage 3: one for each process) holds their names and shapes. DeepSpeed's own
`zero_to_fp32` unpickles these files without restraint; here they are read as tensors and plain values.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya import hookimpl
from terakoya.components import Importer
from terakoya.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

logger = logging.getLogger("terakoya")

OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
STAGES = {"optimizer_states": 1, "gradients": 2, "weights": 3}
"""DeepSpeed's names of its stages."""


class DeepSpeed(Importer):
    """A Transformers model that was trained with ZeRO.

    Attributes:
        config: a folder with the model's config.json; null looks in the checkpoint's folder and above it.
    """

    config: Path | None = None

    def read(self, source: Path, out: Path) -> None:
        """Reads `source`, a `global_step` folder or one above it with `latest`, and writes a Transformers folder.

        Raises:
            UserError: a share that is missing, no config, a weight without a place.
        """
        from terakoya.toolkit.formats import from_state_dict as foreign_model

        folder = find_step(source)
        kind, config = _model_class(self.config, folder)
        weights = {name.removeprefix("module."): value for name, value in read_weights(folder).items()}
        foreign_model.write(kind, config, weights, folder, out)


def find_step(source: Path) -> Path:
    """The folder with the shares: `source`, or the one that its `latest` names. UserError if there is none."""
    latest = source / "latest"
    folder = source / latest.read_text(encoding="utf-8").strip() if latest.is_file() else source
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if not any(MODEL.fullmatch(path.name) for path in folder.iterdir()):
        raise UserError(f"{folder}: expected files mp_rank_00_model_states.pt, found none")
    return folder


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The whole weights and saved buffers, by name.

    Raises:
        UserError: a share is missing, sizes that do not fit together, or tensor parallelism.
    """
    from terakoya.toolkit.formats import restricted_unpickler as pickled

    models, shares = _files(folder, MODEL), _files(folder, OPTIMIZER)
    states = [_table(pickled.load(path), path, "module") for path in models]
    head = states[0]
    if not shares:
        kinds = ", ".join(sorted({str(value.dtype).removeprefix("torch.") for value in head["module"].values()}))
        logger.warning(
            "%s: no shares of an optimizer: the weights are those the model computed with, %s", folder, kinds
        )
        return dict(head["module"])
    contents = [_table(pickled.load(path), path, "optimizer_state_dict")["optimizer_state_dict"] for path in shares]
    stage, expected = _stage(contents[0], shares[0]), contents[0].get("partition_count")
    expected = max(expected) if isinstance(expected, list | tuple) else expected
    if expected != len(shares) or (stage == 3 and len(states) != len(shares)):
        raise UserError(f"{folder}: expected the shares of {expected} processes, found {len(shares)}; one is missing")
    lacking = [key for key in ("param_shapes", "buffer_names", "shared_params") if key not in head]
    if lacking:
        raise UserError(f"{models[0]}: holds no {', '.join(lacking)}; written by a DeepSpeed before 0.7?")
    found: dict[str, Tensor] = {name: head["module"][name] for name in head["buffer_names"] if name in head["module"]}
    found |= _frozen(states, stage)
    if stage == 3:
        found |= _from_slices(contents, head["param_shapes"], folder)
    else:
        found |= _from_shares(contents, head["param_shapes"], folder)
    found |= {name: found[other] for name, other in head["shared_params"].items() if other in found}
    return found


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The folder's files of this kind, by process. UserError for a second tensor-parallel rank."""
    found = [(match, path) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))]
    wrong = [path for match, path in found if int(match[2]) != 0]
    if wrong:
        raise UserError(f"{wrong[0]}: tensor or pipeline parallelism of DeepSpeed cannot be imported")
    return [path for _, path in sorted(found, key=lambda item: int(item[0][1] or 0))]


def _table(content: Any, file: Path, key: str) -> Mapping[str, Any]:
    if not isinstance(content, dict) or not isinstance(content.get(key), dict):
        raise UserError(f"{file}: holds no {key}")
    return content


def _stage(content: Mapping[str, Any], file: Path) -> int:
    """ZeRO's stage. DeepSpeed writes a number or a member of its enumeration."""
    stage: Any = content.get("zero_stage")
    if not isinstance(stage, int):
        stage = next(iter(getattr(stage, "args", ())[-1:]), stage)
        stage = STAGES.get(stage, stage) if isinstance(stage, str) else stage
    if stage not in (1, 2, 3):
        raise UserError(f"{file}: expected ZeRO stage 1, 2 or 3, got {stage}")
    return int(stage)


def _frozen(states: Sequence[Mapping[str, Any]], stage: int) -> dict[str, Tensor]:
    """Weights that were not trained: whole in stages 1 and 2, in slices in stage 3."""
    import torch

    found = {}
    for name, shape in (states[0].get("frozen_param_shapes") or {}).items():
        pieces = [state["frozen_param_fragments"][name] for state in (states if stage == 3 else states[:1])]
        found[name] = torch.cat([piece.flatten() for piece in pieces])[: math.prod(shape)].reshape(tuple(shape))
    return found


def _from_shares(
    contents: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Sequence[int]]], folder: Path
) -> dict[str, Tensor]:
    """Stages 1 and 2: each group of weights is one long vector, cut into as many shares as processes."""
    import torch

    groups = [content["single_partition_of_fp32_groups"] for content in contents]
    paddings = contents[0].get("param_alignment_paddings")
    if any(len(group) != len(shapes) for group in groups):
        raise UserError(f"{folder}: expected {len(shapes)} groups of weights in every share")
    found: dict[str, Tensor] = {}
    for number, names in enumerate(shapes):
        vector = torch.cat([group[number].flatten() for group in groups])
        place = 0
        for index, (name, shape) in enumerate(names.items()):
            size = math.prod(shape)
            if place + size > len(vector):
                raise UserError(f"{folder}: {name} ends behind the {len(vector):,} numbers of group {number}")
            found[name] = vector[place : place + size].reshape(tuple(shape))
            place += size + (int(paddings[number][index]) if paddings is not None else 0)
        if len(vector) - place >= 2 * len(contents):  # what rounds the vector up to shares of even length
            raise UserError(f"{folder}: group {number} has {len(vector):,} numbers, its weights take {place:,}")
    return found


def _from_slices(
    contents: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Sequence[int]]], folder: Path
) -> dict[str, Tensor]:
    """Stage 3: each weight is cut into as many slices as processes, the last one filled up."""
    import torch

    vectors = [torch.cat([group.flatten() for group in content["fp32_flat_groups"]]) for content in contents]
    found: dict[str, Tensor] = {}
    place = 0
    for name, shape in [item for names in shapes for item in names.items()]:
        size = math.prod(shape)
        slice_size = math.ceil(size / len(contents))
        if any(place + slice_size > len(vector) for vector in vectors):
            raise UserError(f"{folder}: {name} ends behind the numbers of a process")
        slices = [vector[place : place + slice_size] for vector in vectors]
        found[name] = torch.cat(slices)[:size].reshape(tuple(shape))
        place += slice_size
    if any(len(vector) != place for vector in vectors):
        raise UserError(
            f"{folder}: a process has {len(vectors[0]):,} numbers, its slices of the weights take {place:,}"
        )
    return found


def _model_class(given: Path | None, folder: Path) -> tuple[type[PreTrainedModel], Any]:
    """The class and config of the model. UserError if there is no config, or one that names no class."""
    import transformers

    places = [given] if given else [folder, folder.parent]
    place = next((each for each in places if (each / "config.json").is_file()), None)
    if place is None:
        raise UserError(
            f"{' or '.join(map(str, places))}: expected a config.json, found none; name the folder of one with the "
            "setting config (--config DIR)"
        )
    config = transformers.AutoConfig.from_pretrained(place, local_files_only=True)
    name = next(iter(config.architectures or ()), None)
    kind = getattr(transformers, name, None) if name else None
    if kind is None:
        raise UserError(
            f"{place / 'config.json'}: architectures: expected a class of Transformers, got {name}; write for example "
            '"architectures": ["LlamaForCausalLM"]'
        )
    return kind, config


@hookimpl
def register_importers() -> dict[str, type[Importer]]:
    """Offers `deepspeed`."""
    return {"deepspeed": DeepSpeed}
