"""Products of linear layers in 8-bit floating point, by accelerate's recipe for torchao (Micikevicius et al., 2022,
arXiv:2209.05433).

Weights keep their names and stay fp32; around each product both sides are scaled and cast. First and last linear layers
of a model, and those with a side that 16 does not divide, stay bf16. So far this was run on processors alone, where
torchao can pretend to multiply in 8 bits, and never on a device that does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from terakoya.errors import UserError
from terakoya.training.model.module_parts import top_level_models

CAPABILITY = (8, 9)
"""The least compute capability whose tensor cores multiply 8-bit numbers: Ada's; Hopper's is 9.0."""


def check(device: torch.device) -> None:
    """Raises UserError where `device` cannot, or torchao is not installed."""
    found = "cpu"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= CAPABILITY:
            _recipe()
            return
        found = f"{torch.cuda.get_device_name(device)} of {major}.{minor}"
    raise UserError(
        f'precision: "fp8" needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or more (Ada, Hopper, '
        f'Blackwell), got {found}; use "bf16"'
    )


def convert(module: nn.Module) -> None:
    """Lets the linear layers of every model in `module` multiply in 8 bits, in place.

    Raises:
        UserError: a model has none that could, as GPT-2, whose layers are of another kind.
    """
    from accelerate.utils.ao import convert_model_to_fp8_ao, has_ao_layers

    recipe = _recipe()
    for model in top_level_models(module):
        convert_model_to_fp8_ao(model, config=recipe.config, module_filter_func=recipe.module_filter_func)
        if not has_ao_layers(model):
            raise UserError(
                f'precision: "fp8" changes nothing in {type(model).__name__}: expected linear layers (torch.nn.Linear) '
                'between its first and its last, of widths that 16 divides; use "bf16"'
            )


def _recipe() -> Any:
    """accelerate's recipe for torchao: each tensor scaled by its largest number, as it comes."""
    try:
        from torchao.float8 import Float8LinearConfig
    except ImportError as error:
        raise UserError(f'precision: "fp8": {error}; install it with `pip install "terakoya[fp8]"`') from error
    from accelerate.utils import AORecipeKwargs

    return AORecipeKwargs(config=Float8LinearConfig(pad_inner_dim=True))
