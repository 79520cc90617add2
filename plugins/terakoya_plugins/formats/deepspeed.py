"""Imports the float32 master weights of a Transformers model from DeepSpeed's ZeRO checkpoints, stages 1 to 3.

`*_zero_pp_rank_N_mp_rank_00_optim_states.pt` contains rank N's partition of all trained weights, flattened and
concatenated; `mp_rank_00_model_states.pt` (stage 3: one per rank) contains their names and shapes. DeepSpeed's own
`zero_to_fp32` unpickles these files without restrictions; this module reads only tensors and plain values.
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
"""DeepSpeed's name of a stage -> its number."""


class DeepSpeed(Importer):
    """A Transformers model that was trained with ZeRO."""

    config: Path | None = None
    """A folder with the model's config.json; null is the checkpoint's folder or its parent folder."""

    def read(self, source: Path, out: Path) -> None:
        """Reads `source`, a `global_step` folder or its parent with a file `latest`, and writes a Transformers folder.

        Raises:
            UserError: a missing partition, no config, or a weight that the model does not have.
        """
        from terakoya.toolkit.formats import from_state_dict

        folder = find_step_folder(source)
        model_class, config = _load_config(self.config, folder)
        weights = {name.removeprefix("module."): value for name, value in read_weights(folder).items()}
        from_state_dict.write_model(model_class, config, weights, folder, out)


def find_step_folder(source: Path) -> Path:
    """Returns the folder with the partitions: `source`, or the folder that the file `latest` in it names.

    Raises:
        UserError: there is none.
    """
    latest = source / "latest"
    folder = source / latest.read_text(encoding="utf-8").strip() if latest.is_file() else source
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if not any(MODEL.fullmatch(path.name) for path in folder.iterdir()):
        raise UserError(f"{folder}: expected files mp_rank_00_model_states.pt, found none")
    return folder


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Returns the full weights and the saved buffers, by name.

    Raises:
        UserError: a missing partition, sizes that do not match, or tensor parallelism.
    """
    from terakoya.toolkit.formats import restricted_unpickler

    model_files, partition_files = _list_files(folder, MODEL), _list_files(folder, OPTIMIZER)
    states = [_check_key(restricted_unpickler.load(path), path, "module") for path in model_files]
    first = states[0]
    if not partition_files:
        dtypes = ", ".join(sorted({str(value.dtype).removeprefix("torch.") for value in first["module"].values()}))
        logger.warning("%s: no partitions of an optimizer: the weights are those of the model, %s", folder, dtypes)
        return dict(first["module"])
    contents = [
        _check_key(restricted_unpickler.load(path), path, "optimizer_state_dict")["optimizer_state_dict"]
        for path in partition_files
    ]
    stage, expected = _zero_stage(contents[0], partition_files[0]), contents[0].get("partition_count")
    expected = max(expected) if isinstance(expected, list | tuple) else expected
    count = len(partition_files)
    if expected != count or (stage == 3 and len(states) != count):
        raise UserError(f"{folder}: expected the partitions of {expected} ranks, found {count}; a file is missing")
    missing = [key for key in ("param_shapes", "buffer_names", "shared_params") if key not in first]
    if missing:
        raise UserError(f"{model_files[0]}: has no {', '.join(missing)}; was it written by DeepSpeed before 0.7?")
    buffers = [name for name in first["buffer_names"] if name in first["module"]]
    weights: dict[str, Tensor] = {name: first["module"][name] for name in buffers}
    weights |= _read_frozen(states, stage)
    if stage == 3:
        weights |= _join_slices(contents, first["param_shapes"], folder)
    else:
        weights |= _join_partitions(contents, first["param_shapes"], folder)
    weights |= {name: weights[other] for name, other in first["shared_params"].items() if other in weights}
    return weights


def _list_files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    matches = [(match, path) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))]
    unsupported = [path for match, path in matches if int(match[2]) != 0]
    if unsupported:
        raise UserError(f"{unsupported[0]}: tensor or pipeline parallelism of DeepSpeed cannot be imported")
    return [path for _, path in sorted(matches, key=lambda item: int(item[0][1] or 0))]


def _check_key(content: Any, file: Path, key: str) -> Mapping[str, Any]:
    if not isinstance(content, dict) or not isinstance(content.get(key), dict):
        raise UserError(f"{file}: has no {key}")
    return content


def _zero_stage(content: Mapping[str, Any], file: Path) -> int:
    """Returns the stage of ZeRO. DeepSpeed writes a number or a member of its enumeration."""
    stage: Any = content.get("zero_stage")
    if not isinstance(stage, int):
        stage = next(iter(getattr(stage, "args", ())[-1:]), stage)
        stage = STAGES.get(stage, stage) if isinstance(stage, str) else stage
    if stage not in (1, 2, 3):
        raise UserError(f"{file}: expected ZeRO stage 1, 2 or 3, got {stage}")
    return int(stage)


def _read_frozen(states: Sequence[Mapping[str, Any]], stage: int) -> dict[str, Tensor]:
    """Returns the weights that were not trained: stages 1 and 2 save them whole, stage 3 in slices."""
    import torch

    weights = {}
    for name, shape in (states[0].get("frozen_param_shapes") or {}).items():
        slices = [state["frozen_param_fragments"][name] for state in (states if stage == 3 else states[:1])]
        weights[name] = torch.cat([each.flatten() for each in slices])[: math.prod(shape)].reshape(tuple(shape))
    return weights


def _join_partitions(
    contents: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Sequence[int]]], folder: Path
) -> dict[str, Tensor]:
    """Joins the partitions of stages 1 and 2, which cut the vector of each parameter group into one part per rank."""
    import torch

    groups = [content["single_partition_of_fp32_groups"] for content in contents]
    paddings = contents[0].get("param_alignment_paddings")
    if any(len(group) != len(shapes) for group in groups):
        raise UserError(f"{folder}: expected {len(shapes)} groups of weights in every partition")
    weights: dict[str, Tensor] = {}
    for number, names in enumerate(shapes):
        vector = torch.cat([group[number].flatten() for group in groups])
        offset = 0
        for index, (name, shape) in enumerate(names.items()):
            size = math.prod(shape)
            if offset + size > len(vector):
                raise UserError(f"{folder}: {name} ends after the {len(vector):,} numbers of group {number}")
            weights[name] = vector[offset : offset + size].reshape(tuple(shape))
            offset += size + (int(paddings[number][index]) if paddings is not None else 0)
        if len(vector) - offset >= 2 * len(contents):  # padding makes the partitions equally long, an even number each
            raise UserError(f"{folder}: group {number} has {len(vector):,} numbers, its weights take {offset:,}")
    return weights


def _join_slices(
    contents: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Sequence[int]]], folder: Path
) -> dict[str, Tensor]:
    """Joins the slices of stage 3, where each weight is cut into a slice per rank and the last slice is padded."""
    import torch

    vectors = [torch.cat([group.flatten() for group in content["fp32_flat_groups"]]) for content in contents]
    weights: dict[str, Tensor] = {}
    offset = 0
    for name, shape in [item for names in shapes for item in names.items()]:
        size = math.prod(shape)
        slice_size = math.ceil(size / len(contents))
        if any(offset + slice_size > len(vector) for vector in vectors):
            raise UserError(f"{folder}: {name} ends after the numbers of a rank")
        slices = [vector[offset : offset + slice_size] for vector in vectors]
        weights[name] = torch.cat(slices)[:size].reshape(tuple(shape))
        offset += slice_size
    if any(len(vector) != offset for vector in vectors):
        raise UserError(f"{folder}: a rank has {len(vectors[0]):,} numbers, its slices of the weights take {offset:,}")
    return weights


def _load_config(setting: Path | None, folder: Path) -> tuple[type[PreTrainedModel], Any]:
    import transformers

    candidates = [setting] if setting else [folder, folder.parent]
    config_folder = next((path for path in candidates if (path / "config.json").is_file()), None)
    if config_folder is None:
        raise UserError(
            f"{' or '.join(map(str, candidates))}: expected a config.json, found none; name its folder with the "
            "setting config (--config DIR)"
        )
    config = transformers.AutoConfig.from_pretrained(config_folder, local_files_only=True, trust_remote_code=False)
    name = next(iter(config.architectures or ()), None)
    model_class = getattr(transformers, name, None) if name else None
    if model_class is None:
        file = config_folder / "config.json"
        raise UserError(
            f"{file}: architectures: expected a class of Transformers, got {name}; write for example "
            '"architectures": ["LlamaForCausalLM"]'
        )
    return model_class, config


@hookimpl
def register_importers() -> dict[str, type[Importer]]:
    return {"deepspeed": DeepSpeed}
