"""Finds a finished model (a Transformers folder, an export or a checkpoint) and loads it.

Transformers' Auto classes load the model, from local files only.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.components.tokenizer import load_tokenizer
from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found
from terakoya.plugins.foreign_models import foreign_model_problem

if TYPE_CHECKING:
    import torch

MASK = "[MASK]"
DISCRIMINATOR_CLASS = "ElectraForPreTraining"
"""Transformers' class that predicts for each token whether it was replaced."""
REPLACED_LABEL = "replaced"
"""The label that makes a token classifier a discriminator."""

log = logging.getLogger("terakoya")


def find_device(name: str | None, *, precision: str = "fp32") -> torch.device:
    """Returns the device of this name, by default the first GPU or the CPU; warns where it multiplies `precision`
    slowly. Raises UserError if torch has none of this name, or sees no GPU where one is named."""
    import torch

    from terakoya.distributed.context import with_index
    from terakoya.toolkit.fast_products import precision_problems

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise UserError(f'--device: expected a device of torch, such as "cpu" or "cuda:0", got "{name}"') from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {name}: torch sees no GPU on this machine; use --device cpu")
    device = with_index(device)
    for text in precision_problems(precision, device):
        log.warning(text)
    return device


def move(model: Any, device: torch.device) -> Any:
    """Returns `model` on `device`, in float32 where it is of a precision that the device multiplies slowly."""
    import torch

    from terakoya.toolkit.fast_products import DTYPES, multiplies_fast

    is_slow = any(model.dtype == dtype and not multiplies_fast(name, device) for name, dtype in DTYPES.items())
    return model.to(device, torch.float32) if is_slow else model.to(device)


def find_models(folder: Path) -> Path:
    """Returns the folder with the model or models that `folder` refers to, after checking their files: a run (its
    newest whole checkpoint is used), RUN@STEP, a checkpoint, or already such a folder. Raises UserError if the model of
    a run or checkpoint is damaged."""
    from terakoya.runs.finding import find_checkpoint, names_checkpoint

    if not names_checkpoint(folder):
        return folder
    return find_checkpoint(folder, hashed=("model/", "tokenizer/")) / "model"


def find_model(folder: Path, text: str = "") -> tuple[Path, bool]:
    """Returns the Transformers folder that `folder` refers to, and whether its model is a discriminator. Raises
    UserError if there is no model, or it is damaged.

    `folder` is whatever `find_models` takes. Of a folder that contains `generator/` and `discriminator/`, the generator
    is used if `text` contains a [MASK], else the discriminator.
    """
    folder = find_models(folder)
    if not (folder / "config.json").is_file():
        part = folder / ("generator" if MASK in text else "discriminator")
        if not (part / "config.json").is_file():
            there = describe_found(folder, "Transformers model")
            if not folder.exists():
                raise UserError(f"{folder}: expected a Transformers folder, got {there}")
            raise UserError(f"{folder}: expected a Transformers folder, found no config.json in {there}")
        folder = part
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    classes = config.get("architectures") or ()
    return folder, DISCRIMINATOR_CLASS in classes or REPLACED_LABEL in (config.get("label2id") or {})


def is_causal(folder: Path) -> bool:
    """Whether the Transformers folder `folder` contains a causal language model."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = [*(config.get("architectures") or ()), *(config.get("auto_map") or ())]
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def custom_code_files(folder: Path) -> list[str]:
    """Names of the Python files that Transformers would run to load the model in `folder`.

    Empty if Transformers has the model itself.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") in CONFIG_MAPPING_NAMES:
        return []
    auto_map = (config.get("auto_map") or {}).values()
    classes = [name for value in auto_map for name in (value if isinstance(value, list) else [value]) if name]
    return sorted({f"{name.rpartition('.')[0]}.py" for name in classes})


def load_model_and_tokenizer(
    auto: Any,
    folder: Path,
    *,
    trust: bool = False,
    is_new: Callable[[Any, str], bool] = lambda model, name: False,
    **options: Any,
) -> tuple[Any, Any]:
    """Returns the model of `folder`, in evaluation mode, and its tokenizer, which is in a folder next to the models in
    a checkpoint. Raises UserError if one cannot be loaded, weights are missing or of other shapes, a file is not that
    which an export wrote, or the folder contains code and `trust` is false.

    Args:
        auto: the Auto class of Transformers that loads the model.
        trust: whether to run Python code that the folder contains.
        is_new: (model, name of a weight) -> whether the folder need not have that weight; it is then random.
        options: further arguments of `from_pretrained`, such as `dtype`.
    """
    from terakoya.inference.padded_attention import use_safe_attention
    from terakoya.toolkit.architectures import disentangled
    from terakoya.toolkit.formats import folder_digests, model_folder

    use_safe_attention()
    code = custom_code_files(folder)
    if code and not trust:
        raise UserError(
            f"{folder}: Transformers does not have this model; the folder contains its code, {', '.join(code)}. Read "
            "the code; to run it on this machine, add --trust-remote-code (in Python: trust_remote_code=True)"
        )
    if problem := foreign_model_problem(folder):
        raise UserError(problem)
    model_folder.silence_logging()
    candidates = [folder, folder.parent / "tokenizer", folder.parent.parent / "tokenizer"]
    tokenizer_folder = next((path for path in candidates if (path / "tokenizer_config.json").is_file()), folder)
    try:
        with folder_digests.check_while_loading(folder):
            tokenizer = load_tokenizer(tokenizer_folder, trust_remote_code=trust)
            model, info = auto.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust, output_loading_info=True, **options
            )
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, EOFError) as error:
        raise UserError(f"{folder}: cannot be loaded: {error}") from error
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{folder}: its weights are a pickle that is damaged or asks for more than tensors; it was not read. Get "
            "the model as safetensors"
        ) from error
    other = [each for each in sorted(info["mismatched_keys"]) if not is_new(model, each[0])]
    if other:  # only with ignore_mismatched_sizes; without it Transformers raises an error
        shapes = "; ".join(f"{name} has the shape {list(its)}, expected {list(ours)}" for name, its, ours in other[:5])
        raise UserError(
            f"{folder}: its weights are not those of its config.json: {shapes}; Transformers would initialise them at "
            "random; export or download the model again"
        )
    missing = sorted(name for name in info["missing_keys"] if not is_new(model, name))
    if missing:
        raise UserError(
            f"{folder}: has no weights for {', '.join(missing[:5])}; "
            "Transformers would initialise them at random, so the model's output would mean nothing"
        )
    if model.config.model_type == "deberta":
        disentangled.fit_autocast(model)
    return model.eval(), tokenizer
