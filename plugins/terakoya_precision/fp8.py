"""8-bit floating-point matrix products in linear layers, by accelerate's torchao recipe (Micikevicius et al., 2022,
arXiv:2209.05433).

fp8 shards nothing. FSDP gathers weights in bf16 before each process casts them, a stage of a pipeline has whole layers,
and processes that divide layers exchange the largest values of what they have in parts, so that a
scale is always that of a whole tensor. fp8 needs `nn.Linear` layers whose widths are multiples of 16. Weights keep
their names and stay fp32; both operands of each product are scaled and cast.
The first and last linear layers of a model, and layers with another width, stay bf16. Scaling and casting are passes of
their own unless they are compiled, so runs without `compile` are refused. On a CPU torchao emulates 8-bit products; a
GPU has computed 50 steps of a BERT of two layers with them, with losses within 0.0101 of float32's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from terakoya.config.conflicts import compile_obstacle
from terakoya.errors import UserError, import_extra
from terakoya.toolkit.gpu_compiler import missing_tools
from terakoya.training.model.module_parts import top_level_models

if TYPE_CHECKING:
    from terakoya.config.fields import ParameterFields

MIN_CAPABILITY = (8, 9)
"""The lowest compute capability whose tensor cores multiply 8-bit numbers: Ada has 8.9, Hopper 9.0."""


def find_conflicts(parameters: ParameterFields) -> Iterator[str]:
    """Yields what does not go together with 8-bit products in `parameters`, with what to do."""
    if parameters.parallel.engine == "deepspeed":
        yield 'precision: "fp8" is for parallel.engine "ddp" or "fsdp", got "deepspeed"; use one of them'
    if parameters.lora is not None:
        yield 'precision: "fp8" cannot be used with lora, whose products are small; use "bf16"'
    if parameters.compile == "off":
        yield (
            'precision: "fp8" is slower than "bf16" without compiled kernels, which scale and cast at once; got '
            'compile: "off"; use "compile": "auto", or "precision": "bf16"'
        )
    elif parameters.compile == "auto" and (obstacle := compile_obstacle(parameters, "blocks")) is not None:
        yield f'precision: "fp8" needs compiled blocks, and {obstacle}; use "precision": "bf16"'


def check(device: torch.device) -> None:
    """Raises UserError where `device` has no 8-bit tensor cores, nothing writes kernels for it, or torchao is not
    installed."""
    found = "cpu"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= MIN_CAPABILITY:
            _recipe()
            if lacks := missing_tools(device):
                raise UserError(f'precision: "fp8" needs compiled blocks, and {lacks}; use "precision": "bf16"')
            return
        found = f"{torch.cuda.get_device_name(device)} of {major}.{minor}"
    raise UserError(
        f'precision: "fp8" needs a GPU of compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or more (Ada, '
        f'Hopper, Blackwell), got {found}; use "bf16"'
    )


def convert(module: nn.Module) -> None:
    """Makes the linear layers of every model in `module` multiply in 8 bits, in place.

    Raises:
        UserError: a model has no such layers; GPT-2's, for example, are of another class.
    """
    from accelerate.utils.ao import convert_model_to_fp8_ao, has_ao_layers

    recipe = _recipe()
    for model in top_level_models(module):
        convert_model_to_fp8_ao(model, config=recipe.config, module_filter_func=recipe.module_filter_func)
        if not has_ao_layers(model):
            raise UserError(
                f'precision: "fp8" changes nothing in {type(model).__name__}: expected linear layers (torch.nn.Linear) '
                'between the first and the last one, with widths divisible by 16; use "bf16"'
            )


def _recipe() -> Any:
    """accelerate's recipe for torchao, with dynamic scaling: each tensor is scaled by its current largest value."""
    config = import_extra("torchao.float8", "fp8", 'precision: "fp8"').Float8LinearConfig(pad_inner_dim=True)
    from accelerate.utils import AORecipeKwargs

    return AORecipeKwargs(config=config)
