"""Measures the `Transformer` of a run: sizes from its own module, bytes per token from simulated steps at two depths
and with two numbers of rows, so that it works for a plugin's model too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor, nn

from terakoya.checking.fake_tensors import KnownValues, fake_tensors, with_depth
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.training.model.module_parts import architecture_of, top_level_models
from terakoya_clusters.layouts.cluster import Recomputation
from terakoya_clusters.layouts.transformer import Shares, Transformer
from terakoya_parallel.tensor_layers import TensorDivision, TensorParallelGroup, partition_blocks
from terakoya_planning import fake_step
from terakoya_planning.engine_memory import FLOAT16, FLOAT32
from terakoya_planning.memory_tracker import CAST_WEIGHTS, GRADIENTS, OPTIMIZER, WEIGHTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYERS, ROWS = (1, 2), (1, 2)
"""Simulated depths and rows: memory of a layer, of a row and of a layer's row follow."""
PROCESSES = 2
"""Simulated tensor-parallel processes."""
NOT_ACTIVATIONS = {WEIGHTS, GRADIENTS, OPTIMIZER}


SimulateStep = Callable[..., fake_step.Simulation]
"""`fake_step.simulate_step` of a run on GPUs: takes its parameters, `rows` and `divide`."""


class LonelyGroup(TensorParallelGroup):
    """Tensor-parallel processes of which one is there: what they add up is its own values."""

    def all_reduce(self, values: Tensor, *, largest: bool = False) -> Tensor:
        return values.clone()


def measure_transformer(
    parameters: Parameters, vocabulary: Vocabulary, *, context: float, documents_per_row: float = 1.0
) -> tuple[Transformer, float]:
    """Returns the model of `parameters`, and the bytes of optimizer state for each of its weights. Of several models
    the largest has the layers; the others count like a head.

    Args:
        context: average number of positions of its own document that a position attends to.
        documents_per_row: average number of documents in a row, for a run that takes flash attention.

    Raises:
        UserError: the run does not train a model with equal layers, all of them trained.
    """
    architecture, length = parameters.architecture, parameters.data.sequence_length
    config: Any = architecture.config(vocabulary)
    _check(parameters, config)
    if parameters.precision == "fp8":  # keeps what autocast keeps in bf16: what layers read, before it is cast
        parameters = parameters.model_copy(update={"precision": "bf16", "autocast": True})
    with fake_tensors(KnownValues):
        module = parameters.objective.build(architecture, vocabulary)
        models = parameters.objective.exports(module).values()
        model = max(models, key=lambda each: sum(weight.numel() for weight in each.base_model.parameters()))
        try:
            blocks = architecture.blocks(model)
        except NotImplementedError:
            raise UserError(
                f"--gpus: architecture {type(architecture).__name__} does not define its blocks (`blocks`); "
                "use --processes instead"
            ) from None
        matrices = _matrices(blocks[0])
        layer = sum(each.numel() for each in blocks[0].parameters())
        rest = sum(each.numel() for each in module.parameters()) - layer * len(blocks)
        head = sum(_untied_head(each) for each in models)
        causal = model.can_generate()
        flops = parameters.objective.flops_per_token(module, architecture, context=context)
    wide = [outputs for inputs, outputs in matrices if inputs == config.hidden_size and outputs > config.hidden_size]
    feed_forward = max((max(shape) for shape in matrices), default=config.hidden_size)
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    unmeasured = Transformer(
        layers=len(blocks), hidden_size=config.hidden_size, feed_forward=feed_forward,
        heads=config.num_attention_heads,
        key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        vocabulary_size=vocabulary.size, sequence_length=length,
        attention_width=width, gated=wide.count(feed_forward) > 1, products=tuple(matrices),
        other_weights=layer - sum(inputs * outputs for inputs, outputs in matrices),
        embedding_weights=rest - head, head_weights=head, context=context / 2 if causal else context,
        activations={}, tensor_shares={}, position_shares={}, head_activations=0.0, causal=causal,
    )  # fmt: skip
    outside = flops / 3 - unmeasured.layers * unmeasured.layer_flops
    head_share = max(0.0, outside / (2 * unmeasured.hidden_size * unmeasured.vocabulary_size))
    simulate = partial(
        fake_step.simulate_step, vocabulary=vocabulary, gradients_stay=False, gpu=True,
        documents_per_row=documents_per_row,
    )  # fmt: skip
    measured, state = _measure_activations(replace(unmeasured, head_share=head_share), parameters, simulate)
    return _measure_shares(measured, parameters, vocabulary, simulate), state


def _check(parameters: Parameters, config: Any) -> None:
    """Raises UserError if some weights are frozen, or the depth of the model cannot be changed."""
    if parameters.lora is not None or parameters.frozen_layers >= 0:
        raise UserError("--gpus: layouts are suggested for runs that train all weights; use --processes instead")
    if with_depth(parameters, 1) is None or getattr(config, "is_encoder_decoder", False):
        name = type(parameters.architecture).__name__
        raise UserError(f"--gpus: architecture {name} is not made of equal layers; use --processes instead")


def _untied_head(model: PreTrainedModel) -> int:
    """Elements of the vocabulary head of `model`; none if it has no such head, or its embeddings are the head."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return 0 if weight is None or weight is model.get_input_embeddings().weight else weight.numel()


def _matrices(block: nn.Module) -> list[tuple[int, int]]:
    """Both dimensions of each matrix of `block`, the smaller one first: their order does not affect a product's
    time."""
    shapes = [tuple(weight.shape) for weight in block.parameters() if weight.ndim == 2]
    return [(min(shape), max(shape)) for shape in shapes]


def _measure_activations(
    unmeasured: Transformer, parameters: Parameters, simulate: SimulateStep
) -> tuple[Transformer, float]:
    """Returns `unmeasured` with the bytes that a step keeps for a token, and bytes of optimizer state for a weight."""
    length = parameters.data.sequence_length
    activations: dict[Recomputation | None, float] = {}
    head = copies = state = backward = 0.0
    for recomputation in (*get_args(Recomputation), None):
        # one model for all layouts, of which only plain DDP could keep less than autocast does
        changed = parameters.model_copy(update={"activation_checkpointing": recomputation, "autocast": True})
        live: dict[tuple[int, int], int] = {}
        late: dict[int, int] = {}
        for layers in LAYERS:
            for rows in ROWS:
                step = simulate(_with_depth(changed, layers), rows=rows)
                live[layers, rows] = max(_activations(step, fake_step.FORWARD), _activations(step, fake_step.BACKWARD))
                late[rows] = _activations(step, fake_step.LATE_BACKWARD)  # of two layers: the first one's backward
        of_row = live[2, 2] - live[2, 1] - live[1, 2] + live[1, 1]
        activations[recomputation] = max(0.0, of_row / length)
        if recomputation is None:
            copies = max(0.0, (live[2, 1] - live[1, 1] - of_row) / unmeasured.layer_weights)
            head = max(0.0, (live[1, 2] - live[1, 1] - of_row) / length)
            backward = max(0.0, (late[2] - late[1] - of_row) / length)
            state = step.optimizer_bytes / (
                2 * unmeasured.layer_weights + unmeasured.embedding_weights + unmeasured.head_weights
            )
    measured = replace(
        unmeasured, activations=activations, head_activations=head, weight_copies=copies, backward=backward
    )
    return measured, state


def _measure_shares(
    model: Transformer, parameters: Parameters, vocabulary: Vocabulary, simulate: SimulateStep
) -> Transformer:
    """Returns `model` with what tensor-parallel processes keep.

    Two processes are simulated for a run that recomputes nothing. What others keep is known: a layer's input, which is
    divided with `sequence_parallel` alone, and with "selective" the outputs of products, of which those of row-parallel
    layers are kept before they are added up, whole.
    """
    kept = model.activations
    architectures = parameters.objective.architectures(parameters.architecture)
    partitions = [each.tensor_partition() for each in architectures]
    if any(each is None or any(size % PROCESSES for size in each.sizes.values()) for each in partitions):
        whole: Shares = {recomputation: (size, 0.0) for recomputation, size in kept.items()}  # refused anyway
        return replace(model, tensor_shares=whole, position_shares=whole)
    changed = parameters.model_copy(update={"activation_checkpointing": None, "autocast": True})

    def of_layer(*, sequence_parallel: bool) -> float:
        group = LonelyGroup(0, PROCESSES, sequence_parallel=sequence_parallel)

        def divide(module: nn.Module) -> None:
            for each in top_level_models(module):
                own = architecture_of(each, architectures, vocabulary, key="--gpus")
                partition = own.tensor_partition()
                assert partition is not None, "see above"
                partition_blocks(own.blocks(each), partition, group, TensorDivision(), dropout=None)

        steps = [simulate(_with_depth(changed, layers), rows=1, divide=divide) for layers in LAYERS]
        less, more = (
            max(_activations(step, window, CAST_WEIGHTS) for window in (fake_step.FORWARD, fake_step.BACKWARD))
            for step in steps
        )
        return (more - less) / parameters.data.sequence_length

    divided = min(kept[None], 2 * max(0.0, kept[None] - of_layer(sequence_parallel=False)))
    products = max(len(each.row_parallel) for each in partitions if each is not None)
    output = model.hidden_size * (FLOAT32 if parameters.precision == "fp32" else FLOAT16)
    sums = min(float(products * output), kept["selective"] - kept["full"])
    tensor: Shares = {
        None: (kept[None] - divided, divided),
        "selective": (kept["full"] + sums, kept["selective"] - kept["full"] - sums),
        "full": (kept["full"], 0.0),
    }
    position: Shares = {
        None: (0.0, PROCESSES * of_layer(sequence_parallel=True)),
        "selective": (sums, kept["selective"] - sums),
        "full": (0.0, kept["full"]),
    }
    return replace(model, tensor_shares=tensor, position_shares=position)


def _with_depth(parameters: Parameters, layers: int) -> Parameters:
    smaller = with_depth(parameters, layers)
    assert smaller is not None, "see _check"
    return smaller


def _activations(step: fake_step.Simulation, window: str, *without: str) -> int:
    """Bytes that were live in `window` without weights, gradients, the optimizer's state and the parts `without`."""
    return sum(size for part, size in step.windows[window].items() if part not in NOT_ACTIVATIONS.union(without))
