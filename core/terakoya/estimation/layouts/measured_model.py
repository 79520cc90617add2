"""The `Transformer` of a run: sizes from its own module, bytes a token from steps without data at two depths and two
numbers of rows, so that a plugin's model is known as well as any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from torch import nn

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.estimation import fake_step as simulation
from terakoya.estimation.layouts.cluster import Recomputation
from terakoya.estimation.layouts.transformer import Transformer
from terakoya.estimation.memory_tracker import GRADIENTS, OPTIMIZER, WEIGHTS

LAYERS, ROWS = (1, 2), (1, 2)
"""What is tried: what a layer, a row and a layer's row take follows."""
NO_OTHERS = {WEIGHTS, GRADIENTS, OPTIMIZER}


def measure_transformer(parameters: Parameters, vocabulary: Vocabulary, *, context: float) -> tuple[Transformer, float]:
    """The model of `parameters`, and the bytes of optimizer state for each of its weights.

    Args:
        context: positions of its own document that a position has, on average.

    Raises:
        UserError: it is not one model of equal layers, all of them trained.
    """
    architecture, length = parameters.architecture, parameters.data.sequence_length
    config: Any = architecture.config(vocabulary)
    _check(parameters, config)
    with simulation.fake_tensors(vocabulary):
        module = parameters.objective.build(architecture, vocabulary)
        models = list(parameters.objective.exports(module).values())
        if len(models) != 1:
            raise UserError("--gpus: layouts are suggested for objectives of one model; say --processes instead")
        model = models[0]
        try:
            blocks = architecture.blocks(model)
        except NotImplementedError:
            raise UserError(
                f"--gpus: architecture {type(architecture).__name__} does not say which blocks it has (`blocks`); "
                "say --processes instead"
            ) from None
        matrices = _matrices(blocks[0])
        layer = sum(each.numel() for each in blocks[0].parameters())
        rest = sum(each.numel() for each in module.parameters()) - layer * len(blocks)
        tied = model.get_input_embeddings().weight is getattr(model.get_output_embeddings(), "weight", None)
        causal = model.can_generate()
    head = 0 if tied else vocabulary.size * config.hidden_size
    gates = [outputs for inputs, outputs in matrices if inputs == config.hidden_size and outputs > config.hidden_size]
    feed_forward = max((max(each) for each in matrices), default=config.hidden_size)
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    bare = Transformer(
        layers=len(blocks), hidden_size=config.hidden_size, feed_forward=feed_forward,
        heads=config.num_attention_heads,
        key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        vocabulary_size=vocabulary.size, sequence_length=length,
        attention_width=width, gated=gates.count(feed_forward) > 1, products=tuple(matrices),
        other_weights=layer - sum(inputs * outputs for inputs, outputs in matrices),
        embedding_weights=rest - head, head_weights=head, context=context / 2 if causal else context,
        activations={}, head_activations=0.0,
    )  # fmt: skip
    return _measured(bare, parameters, vocabulary)


def _check(parameters: Parameters, config: Any) -> None:
    """UserError where weights are not all trained, or there are no smaller models of the same kind to try."""
    if parameters.lora is not None or parameters.frozen_layers >= 0:
        raise UserError("--gpus: layouts are suggested for runs that train all weights; say --processes instead")
    if simulation.with_depth(parameters, 1) is None or getattr(config, "is_encoder_decoder", False):
        name = type(parameters.architecture).__name__
        raise UserError(f"--gpus: architecture {name} is not made of layers that are alike; say --processes instead")


def _matrices(block: nn.Module) -> list[tuple[int, int]]:
    """The two dimensions of each matrix of `block`; which of them is the inputs' does not matter to a product's time,
    so (hidden size, other) is written first."""
    shapes = [tuple(weight.shape) for weight in block.parameters() if weight.ndim == 2]
    return [(min(shape), max(shape)) for shape in shapes]


def _measured(bare: Transformer, parameters: Parameters, vocabulary: Vocabulary) -> tuple[Transformer, float]:
    """`bare` with what a step keeps for a token, and bytes of optimizer state for a weight."""
    length = parameters.data.sequence_length
    activations: dict[Recomputation | None, float] = {}
    head = copies = state = backward = 0.0
    for recomputation in (*get_args(Recomputation), None):
        changed = parameters.model_copy(update={"activation_checkpointing": recomputation})
        live: dict[tuple[int, int], int] = {}
        late: dict[int, int] = {}
        for layers in LAYERS:
            smaller = simulation.with_depth(changed, layers)
            assert smaller is not None, "checked before"
            for rows in ROWS:
                found = simulation.simulate_step(smaller, vocabulary, rows=rows, gradients_stay=False, gpu=True)
                live[layers, rows] = max(_others(found, simulation.FORWARD), _others(found, simulation.BACKWARD))
                late[rows] = _others(found, simulation.LATE_BACKWARD)  # of two layers: the first one's, begun
        of_row = live[2, 2] - live[2, 1] - live[1, 2] + live[1, 1]
        activations[recomputation] = max(0.0, of_row / length)
        if recomputation is None:
            copies = max(0.0, (live[2, 1] - live[1, 1] - of_row) / bare.layer_weights)
            head = max(0.0, (live[1, 2] - live[1, 1] - of_row) / length)
            backward = max(0.0, (late[2] - late[1] - of_row) / length)
            state = found.optimizer_bytes / (2 * bare.layer_weights + bare.embedding_weights + bare.head_weights)
    measured = replace(bare, activations=activations, head_activations=head, weight_copies=copies, backward=backward)
    return measured, state


def _others(found: simulation.Simulation, window: str) -> int:
    """Bytes that were live in `window` beside weights, gradients and the optimizer's state."""
    return sum(size for part, size in found.windows[window].items() if part not in NO_OTHERS)
