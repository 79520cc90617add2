"""Conflicts between settings of a run that do not depend on data or devices: reported before anything is built."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from terakoya import plugins
from terakoya.components import Architecture
from terakoya.config import deepspeed as deepspeed_settings
from terakoya.config import mup
from terakoya.config.parallel import SIZES

if TYPE_CHECKING:
    from terakoya.config.fields import ParameterFields


def check_conflicts(parameters: ParameterFields) -> None:
    """Raises ValueError with the first conflict."""
    for problem in find_conflicts(parameters):
        raise ValueError(problem)


def find_conflicts(parameters: ParameterFields) -> Iterator[str]:
    """Yields each conflict in `parameters`: where, what was expected, what was given, what to do."""
    yield from _data_conflicts(parameters)
    yield from _start_conflicts(parameters)
    yield from _precision_conflicts(parameters)
    yield from _architecture_conflicts(parameters)
    yield from _engine_conflicts(parameters)
    yield from _compile_conflicts(parameters)
    nested = [value for value in dict(parameters.objective).values() if isinstance(value, Architecture)]
    yield from mup.find_problems(
        parameters.mup,
        architectures=[parameters.architecture, *nested],
        optimizer=parameters.optimizer,
        lora=parameters.lora,
    )
    if parameters.cuda_graphs:
        yield from _cuda_graph_conflicts(parameters)
    if parameters.parallel.tp_size > 1:
        yield from _tensor_parallel_conflicts(parameters)
    if parameters.parallel.pp_size > 1:
        yield from _pipeline_parallel_conflicts(parameters)
    if parameters.parallel.position_processes > 1:
        yield from _sequence_parallel_conflicts(parameters)
    if parameters.precision == "fp8":
        yield from _fp8_conflicts(parameters)
    if parameters.objective.compares_examples:
        yield from _compared_examples_conflicts(parameters)


def _data_conflicts(parameters: ParameterFields) -> Iterator[str]:
    bound, length = parameters.architecture.max_sequence_length(), parameters.data.sequence_length
    if bound is not None and length > bound:
        yield f"data.sequence_length: expected at most {bound}, the maximum of the architecture, got {length}"
    if parameters.evaluation and not parameters.data.has_validation:
        yield "evaluation: there is nothing to evaluate on; name a store in data.validation, or give data.split"
    if parameters.data.stages and parameters.epochs is not None:
        yield "epochs: with data.stages the length of an epoch depends on the step; give max_steps"
    if parameters.schedule.needs_validation and not parameters.evaluation:
        yield (
            f"schedule: {type(parameters.schedule).__name__} depends on validation losses; name a store in "
            'data.validation and set how often to validate: "evaluation": {"steps": 1000}'
        )


def _start_conflicts(parameters: ParameterFields) -> Iterator[str]:
    start = parameters.start_from
    if start is not None and start.vocabulary is not None and parameters.frozen_layers >= 0:
        yield (
            f"frozen_layers: {parameters.frozen_layers} freezes the embeddings, and start_from.vocabulary "
            f'"{start.vocabulary}" makes new ones, which would never be trained; set it to -1'
        )


def _precision_conflicts(parameters: ParameterFields) -> Iterator[str]:
    precision = parameters.precision
    if parameters.loss_scaling is not None and precision != "fp16":
        yield (
            f'loss_scaling: is for precision "fp16", got precision "{precision}", which has the range of float32; '
            "set it to null"
        )
    if parameters.attention == "flash" and precision == "fp32":
        yield 'attention: flash needs precision "bf16" or "fp16", got "fp32"; use "attention": "sdpa"'
    engine = parameters.parallel.engine
    if precision == "fp8" and engine == "deepspeed":
        yield f'precision: "fp8" is for parallel.engine "ddp" or "fsdp", got "{engine}"; use one of them'


def _architecture_conflicts(parameters: ParameterFields) -> Iterator[str]:
    architecture, layout = parameters.architecture, parameters.objective.row_layout().kind
    name = type(architecture).__name__
    if layout == "packed" and architecture.document_masking == "none":
        field = type(parameters.objective).model_fields.get("layout")
        others = [json.dumps(each) for each in get_args(field.annotation) if each != layout] if field else []
        yield (
            f"architecture {name} cannot keep documents in one row apart; use "
            + (f"objective.layout {' or '.join(others)}" if others else "an objective with another layout")
        )
    if parameters.attention == "flash" and architecture.document_masking != "attention_interface":
        yield (
            f"attention: flash is for models that use Transformers' AttentionInterface, which {name} does not; "
            'use "attention": "sdpa"'
        )
    block_users = []
    if parameters.activation_checkpointing is not None:
        block_users.append(("activation_checkpointing", "set it to null"))
    if parameters.parallel.engine == "fsdp":
        block_users.append(('parallel.engine "fsdp"', 'use "engine": "ddp" or "deepspeed"'))
    nested = [value for value in dict(parameters.objective).values() if isinstance(value, Architecture)]
    for each in [architecture, *nested]:
        if type(each).blocks is Architecture.blocks:
            for key, remedy in block_users:
                yield f"{key}: architecture {type(each).__name__} does not define `blocks`; {remedy}"


def _engine_conflicts(parameters: ParameterFields) -> Iterator[str]:
    stage, optimizer = parameters.parallel.zero_stage, parameters.optimizer
    if parameters.parallel.deepspeed_config is not None and stage is not None:
        yield from deepspeed_settings.find_problems(
            parameters.parallel.deepspeed_config,
            zero_stage=stage,
            max_grad_norm=parameters.max_grad_norm,
            precision=parameters.precision,
        )
    if stage and parameters.spikes is not None and parameters.spikes.action == "skip":
        yield (
            f'spikes.action: "skip" needs the gradient norm before the update, but ZeRO stage {stage} computes it '
            'within the update; use "note", zero_stage 0, or "engine": "fsdp"'
        )
    name, needs_all = type(optimizer).__name__, not optimizer.elementwise and not optimizer.tensorwise
    if parameters.parallel.engine == "fsdp" and needs_all:
        yield (
            f'parallel.engine "fsdp": optimizer {name} needs all weights at once (it is neither elementwise nor '
            'tensorwise), but each process has only some of their rows; use engine "ddp" or another optimizer'
        )
    if stage and needs_all:
        yield (
            f"parallel.zero_stage {stage}: optimizer {name} needs all weights at once (it is neither elementwise nor "
            'tensorwise), but ZeRO splits them; use zero_stage 0, engine "ddp" or another optimizer'
        )
    if deepspeed_settings.OFFLOAD_OPTIMIZER in parameters.parallel.offloaded and not optimizer.elementwise:
        yield (
            f"parallel.offload_optimizer_device: optimizer {name} needs whole parameters, which processes exchange "
            "between devices and not between hosts; set it to null, or use adamw or another elementwise optimizer"
        )
    if stage == 3 and parameters.activation_checkpointing == "selective":
        yield (
            'activation_checkpointing: "selective" is for zero_stage 0 to 2: in stage 3 weights are gathered during '
            'the forward that is repeated, differently each time; use "full"'
        )


def _compile_conflicts(parameters: ParameterFields) -> Iterator[str]:
    if parameters.compile in ("blocks", "whole"):
        obstacle = compile_obstacle(parameters, parameters.compile)
        if obstacle is not None:
            remedy = 'use "blocks"' if parameters.compile == "whole" else 'use "off"'
            if parameters.compile == "whole" and compile_obstacle(parameters, "blocks") is not None:
                remedy = 'use "off"'
            yield f'compile: "{parameters.compile}" does not work here: {obstacle}; {remedy}'


def _cuda_graph_conflicts(parameters: ParameterFields) -> Iterator[str]:
    """What keeps CUDA graphs from recording a whole micro-step; see docs/design/cuda-graphs.md."""
    if parameters.compile in ("off", "blocks"):
        yield (
            f"cuda_graphs: a graph holds all from ids to losses, which is compiled whole, got compile: "
            f'"{parameters.compile}"; use "compile": "auto", or "cuda_graphs": false'
        )
    elif (obstacle := compile_obstacle(parameters, "whole")) is not None:
        yield f'cuda_graphs: a graph needs the whole model compiled, and {obstacle}; use "cuda_graphs": false'
    if parameters.activation_checkpointing is not None:
        yield (
            "cuda_graphs: is for models whose kernels are short, and activation_checkpointing adds kernels to save "
            "memory; set it to null, or cuda_graphs to false"
        )
    row_layout = parameters.objective.row_layout()
    layout = row_layout.kind
    if row_layout.framing == "encoder_decoder":
        yield (
            "cuda_graphs: a graph has one shape, and the targets of a decoder beside an encoder are as wide as the "
            'longest of their batch; use "cuda_graphs": false'
        )
    elif row_layout.varies_in_width:
        yield (
            f'cuda_graphs: a graph has one shape, and in the layout "{layout}" rows are as wide as the longest of '
            'their batch; use another objective.layout, or "cuda_graphs": false'
        )


def _fp8_conflicts(parameters: ParameterFields) -> Iterator[str]:
    if parameters.compile == "off":
        yield (
            'precision: "fp8" is slower than "bf16" without compiled kernels, which scale and cast at once; got '
            'compile: "off"; use "compile": "auto", or "precision": "bf16"'
        )
    elif parameters.compile == "auto" and (obstacle := compile_obstacle(parameters, "blocks")) is not None:
        yield f'precision: "fp8" needs compiled blocks, and {obstacle}; use "precision": "bf16"'


def compile_obstacle(parameters: ParameterFields, mode: str) -> str | None:
    """Returns why torch.compile cannot compile the blocks, or with `mode` "whole" everything, of the run that
    `parameters` describe, as the end of a sentence; None where it can."""
    parallel = parameters.parallel
    for key in SIZES:
        if (size := getattr(parallel, key)) > 1:
            return f"with parallel.{key} {size} processes exchange activations inside each forward"
    if parallel.engine == "deepspeed":
        return "DeepSpeed runs code of its own around layers"
    if parallel.engine == "fsdp" and mode == "whole":
        return 'parallel.engine "fsdp" gathers weights inside the forward, block by block'
    nested = [value for value in dict(parameters.objective).values() if isinstance(value, Architecture)]
    for architecture in [parameters.architecture, *nested]:
        name = type(architecture).__name__
        if type(architecture).compile_obstacle is not None:
            return f"architecture {name} cannot be compiled: {type(architecture).compile_obstacle}"
        if mode == "blocks" and type(architecture).blocks is Architecture.blocks:
            return f"architecture {name} does not define `blocks`"
    return None


def _tensor_parallel_conflicts(parameters: ParameterFields) -> Iterator[str]:
    """Conflicts of tensor parallelism, with the nearest settings that work."""
    parallel, optimizer = parameters.parallel, parameters.optimizer
    processes = parallel.tp_size
    key = f"parallel.tp_size {processes}"
    for architecture in parameters.objective.architectures(parameters.architecture):
        name, partition = type(architecture).__name__, architecture.tensor_partition()
        if partition is None:
            supporting = sorted(
                offer.name
                for offer in plugins.registry().components()
                if issubclass(offer.component, Architecture)
                and offer.component.tensor_partition is not Architecture.tensor_partition
                and offer.component.partition_obstacle is None
            )
            obstacle = type(architecture).partition_obstacle
            reason = f"cannot: {obstacle}" if obstacle else "does not define how (`tensor_partition`)"
            yield (
                f"{key}: processes share the layers of {', '.join(supporting)}, but architecture {name} {reason}. "
                'Set it to 1; "engine": "fsdp" splits the weights of any architecture'
            )
            continue
        sizes = partition.sizes
        uneven = [f"{each} {size}" for each, size in sizes.items() if size % processes]
        if uneven:
            common = math.gcd(*sizes.values())
            divisors = [str(size) for size in range(1, common + 1) if common % size == 0]
            yield (
                f"{key}: {' and '.join(uneven)} of architecture {name} cannot be shared evenly; use "
                f"{'one of ' if len(divisors) > 1 else ''}{', '.join(divisors)}"
            )
        if parallel.sequence_parallel and not partition.positions:
            yield (
                f"parallel.sequence_parallel: outside of what {key} divides, the blocks of architecture {name} read "
                "several positions at once, so that no process can do with its own (`TensorPartition.positions`); set "
                "it to false"
            )
    if parallel.sequence_parallel:
        shares = [f" with {each} {size}" for each in ("sp_size", "cp_size") if (size := getattr(parallel, each)) > 1]
        yield from _uneven_positions(
            parameters,
            f"parallel.sequence_parallel among {key}{''.join(shares)}",
            processes * parallel.position_processes,
        )
    if not optimizer.elementwise and not optimizer.tensorwise:
        yield (
            f"{key}: optimizer {type(optimizer).__name__} needs all weights at once (it is neither elementwise nor "
            "tensorwise), but each process has a part of them; use another optimizer, or set it to 1"
        )
    if parameters.precision == "fp8":
        yield f'precision: "fp8" scales the tensors of each process separately, and {key} splits them; use "bf16"'


def _pipeline_parallel_conflicts(parameters: ParameterFields) -> Iterator[str]:
    """Conflicts of pipeline parallelism, with the nearest settings that work."""
    architecture, objective, parallel = parameters.architecture, parameters.objective, parameters.parallel
    key, name = f"parallel.pp_size {parallel.pp_size}", type(architecture).__name__
    alternative = 'Set it to 1; "engine": "fsdp" splits the weights of any architecture'
    offers = plugins.registry().components()
    if type(architecture).keep_stage_blocks is Architecture.keep_stage_blocks:
        supporting = sorted(
            offer.name
            for offer in offers
            if issubclass(offer.component, Architecture)
            and offer.component.keep_stage_blocks is not Architecture.keep_stage_blocks
        )
        yield (
            f"{key}: architecture {name} does not define how it is cut into stages (`keep_stage_blocks`); "
            f"{', '.join(supporting)} do. {alternative}"
        )
    if not objective.single_forward:
        supporting = sorted(offer.name for offer in offers if getattr(offer.component, "single_forward", False))
        yield (
            f"{key}: objective {type(objective).__name__} cannot be cut into stages, because it needs more than one "
            f"forward through one model; {', '.join(supporting)} can. {alternative}"
        )
    if parameters.precision == "fp8":
        yield f'precision: "fp8" needs all blocks in one process, got {key}; use "bf16"'
    if parallel.pp_schedule == "zero_bubble" and parameters.activation_checkpointing is not None:
        yield (
            f'activation_checkpointing: "{parameters.activation_checkpointing}" would compute a block again for the '
            "gradients of hidden states and once more for those of weights, which parallel.pp_schedule "
            '"zero_bubble" separates; set it to null, or use "pp_schedule": "1f1b"'
        )
    stages = parallel.pp_size * parallel.pp_stages_per_process
    blocks: int | None = getattr(architecture, "num_hidden_layers", None)
    if blocks is None:
        return
    if blocks < stages:
        fewer = blocks // parallel.pp_size
        nearest = f"pp_stages_per_process {fewer}" if fewer else f"pp_size {blocks}"
        both = f"{key} with pp_stages_per_process {parallel.pp_stages_per_process}"
        yield (
            f"{key if parallel.pp_stages_per_process == 1 else both}: {stages} stages need at least {stages} blocks, "
            f"but architecture {name} has {blocks}; use {nearest}"
        )
    first = -(-blocks // stages)
    if parameters.frozen_layers >= first:
        yield (
            f"frozen_layers: the first of {stages} stages has {first} of {blocks} blocks and needs one to train: with "
            f"{key} expected at most {first - 1}, got {parameters.frozen_layers}"
        )


def _compared_examples_conflicts(parameters: ParameterFields) -> Iterator[str]:
    """Conflicts of objectives that compare the examples of all micro-batches, in a pass of its own before each step."""
    parallel, name = parameters.parallel, type(parameters.objective).__name__
    others = [
        f'"engine": "{parallel.engine}"' if parallel.engine not in ("ddp", "fsdp") else "",
        *(f"{key} {getattr(parallel, key)}" for key in SIZES if getattr(parallel, key) > 1),
    ]
    for other in filter(None, others):
        yield (
            f"objective: {name} compares the examples of all processes, each of which must have rows of its own, got "
            f'{other}; set parallel.engine to "ddp", or to "fsdp" where the weights are too large for one device'
        )
    if parameters.cuda_graphs:
        yield f"cuda_graphs: {name} embeds all examples in a forward without a backward; set it to false"


def _sequence_parallel_conflicts(parameters: ParameterFields) -> Iterator[str]:
    """Conflicts of sequence and context parallelism, with the nearest settings that work."""
    architecture, objective, parallel = parameters.architecture, parameters.objective, parameters.parallel
    processes, exchanges_heads = parallel.position_processes, parallel.sp_size > 1
    key = f"parallel.{'sp_size' if exchanges_heads else 'cp_size'} {processes}"
    name, length = type(architecture).__name__, parameters.data.sequence_length
    alternative = 'set it to 1, with "activation_checkpointing": "full" if a row is too long for one process'
    if architecture.document_masking != "attention_interface":
        yield f"{key}: is for models that use Transformers' AttentionInterface, which {name} does not; {alternative}"
    if not objective.sums_by_position():
        yield f"{key}: {type(objective).__name__} with these settings needs whole rows; {alternative}"
    if parameters.precision == "fp8":
        yield f'precision: "fp8" scales the tensors of each process separately, and {key} splits them; use "bf16"'
    heads: int | None = getattr(architecture, "num_attention_heads", None)
    tensor = parallel.tp_size
    if exchanges_heads and heads is not None and heads % (processes * tensor):
        heads //= math.gcd(heads, tensor)
        divisors = [str(size) for size in range(2, heads + 1) if heads % size == 0 and length % size == 0]
        yield (
            f"{key}: the {heads} attention heads of {name} cannot be shared evenly; with rows of {length} tokens use "
            + (f"one of {', '.join(divisors)}" if divisors else "1")
            + ', or "cp_size" instead'
        )
    yield from _uneven_positions(parameters, key, processes)


def _uneven_positions(parameters: ParameterFields, key: str, processes: int) -> Iterator[str]:
    """A conflict where the positions of a row are no multiple of `processes`, with the nearest lengths that are."""
    length, bound = parameters.data.sequence_length, parameters.architecture.max_sequence_length()
    if length % processes:
        around = (length // processes * processes, -(-length // processes) * processes)
        nearest = [str(each) for each in around if each >= 8 and (bound is None or each <= bound)]
        yield (
            f"data.sequence_length: {key} splits positions evenly: expected a multiple of {processes}, got "
            f"{length}; the nearest: {' and '.join(nearest) or 'none'}"
        )
