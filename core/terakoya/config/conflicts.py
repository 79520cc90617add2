"""Conflicts between settings of a run that do not depend on data or devices: reported before anything is built."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from terakoya import plugins
from terakoya.components import Architecture
from terakoya.config import deepspeed as deepspeed_settings
from terakoya.config import mup
from terakoya.plugins.engines import SIZES, plugin_engine

if TYPE_CHECKING:
    from terakoya.config.fields import ParameterFields


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
    )
    if parameters.mup is not None and parameters.lora is not None:
        yield "mup: is for weights that are trained whole, and lora trains adapters; set it to null"
    if parameters.cuda_graphs is True and (obstacle := cuda_graph_obstacle(parameters)) is not None:
        yield (
            f'cuda_graphs: none can be recorded: {obstacle}; use "cuda_graphs": "auto", with which a run goes on '
            "without"
        )
    engine = plugins.registry().engines.get(plugin_engine(dict(parameters.parallel)) or "")
    if engine is not None and hasattr(engine[0], "find_conflicts"):
        yield from engine[0].find_conflicts(parameters)
    if parameters.objective.compares_examples:
        yield from _compared_examples_conflicts(parameters)
    transforms = plugins.registry().transforms
    for name in sorted(transforms):
        if transforms[name][0].is_wanted(parameters):
            yield from transforms[name][0].find_conflicts(parameters)


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
            f'loss_scaling: is for precision "fp16", got precision "{precision}"; set it to null, or '
            '"precision": "fp16"'
        )
    if parameters.attention == "flash" and precision == "fp32":
        yield 'attention: flash needs precision "bf16" or "fp16", got "fp32"; use "attention": "sdpa"'


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
            remedy = 'use "blocks"' if compile_obstacle(parameters, "blocks") is None else 'use "off"'
            yield f'compile: "{parameters.compile}" does not work here: {obstacle}; {remedy}'


def cuda_graph_obstacle(parameters: ParameterFields) -> str | None:
    """Returns what keeps CUDA graphs from recording a whole micro-step of the run, as a sentence; None where nothing
    does. See docs/design/cuda-graphs.md."""
    row_layout = parameters.objective.row_layout()
    if parameters.compile in ("off", "blocks"):
        return f'they record what is compiled whole, which compile "{parameters.compile}" excludes'
    if (obstacle := compile_obstacle(parameters, "whole")) is not None:
        return f"they record what is compiled whole, and {obstacle}"
    for key in ("activation_checkpointing", "activation_offloading"):
        if getattr(parameters, key):
            return f"{key} saves memory, which they keep"
    if parameters.objective.compares_examples:
        return f"{type(parameters.objective).__name__} embeds all examples in a forward without a backward"
    if row_layout.framing == "encoder_decoder":
        return (
            "they have one shape, and the targets of a decoder beside an encoder are as wide as the longest of their "
            "batch"
        )
    if row_layout.varies_in_width:
        layout = row_layout.kind
        return f'they have one shape, and in the layout "{layout}" rows are as wide as the longest of their batch'
    return None


def auto_graph_obstacle(parameters: ParameterFields, processes: int) -> str | None:
    """Returns why `"cuda_graphs": "auto"` records nothing in a run of so many processes; None where it does."""
    if (obstacle := cuda_graph_obstacle(parameters)) is not None or processes == 1:
        return obstacle
    return 'they have not been seen in several processes, where "cuda_graphs": true takes them'


def takes_cuda_graphs(parameters: ParameterFields, processes: int) -> bool:
    """Whether a run of so many processes, each with a GPU, records CUDA graphs or tries to."""
    if parameters.cuda_graphs == "auto":
        return auto_graph_obstacle(parameters, processes) is None
    return parameters.cuda_graphs


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


def compile_obstacle(parameters: ParameterFields, mode: str) -> str | None:
    """Returns why torch.compile cannot compile the blocks, or with `mode` "whole" everything, of the run that
    `parameters` describe, as the end of a sentence; None where it can."""
    parallel = parameters.parallel
    for key in SIZES:
        if mode == "whole" and (size := getattr(parallel, key)) > 1:
            return f"with parallel.{key} {size} only blocks are compiled"
    if parallel.pp_size > 1 and parallel.pp_schedule == "zero_bubble":
        return (
            'parallel.pp_schedule "zero_bubble" splits the backward of each block in two, which a compiled one cannot'
        )
    if parallel.tp_size > 1 and not parallel.sequence_parallel and (drops := list(_head_dropouts(parameters))):
        return (
            f"with parallel.tp_size {parallel.tp_size} each process seeds the dropout of its own heads, which no graph "
            f"does (there is none with {' and '.join(drops)}, and parallel.sequence_parallel seeds it outside of "
            "graphs)"
        )
    if parallel.cp_size > 1 and parameters.attention not in ("sdpa", "eager"):
        return f'with parallel.cp_size {parallel.cp_size} blocks have been traced with "attention": "sdpa" alone'
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


def _head_dropouts(parameters: ParameterFields) -> Iterator[str]:
    """Yields what each key of dropout inside of what `parallel.tp_size` divides would have to be, where it is not."""
    from terakoya.toolkit.architectures.attention import DROPOUTS

    architectures = parameters.objective.architectures(parameters.architecture)
    partitions = [each.tensor_partition() for each in architectures]
    for name in dict.fromkeys((*DROPOUTS, *(key for each in partitions if each is not None for key in each.dropouts))):
        if any(getattr(each, name, 0.0) for each in architectures):
            yield f"{name} 0.0"
    if parameters.lora is not None and parameters.lora.lora_dropout:
        yield "lora.lora_dropout 0.0"
