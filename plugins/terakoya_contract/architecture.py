"""Checks of an architecture: built from the seed alone, gradients at every weight, documents kept apart.

Letters in shapes: B rows, T positions, S positions of a decoder, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor, nn

from terakoya.components import Architecture, Head
from terakoya.components.rows import Layout
from terakoya.errors import nearest
from terakoya.toolkit.architectures import attention
from terakoya.toolkit.architectures.transformers_model import TransformersArchitecture
from terakoya.training.model import compilation
from terakoya_contract import batches, partition, settings, stages
from terakoya_contract.batches import difference
from terakoya_contract.results import Check, CheckFailed, CheckSkipped
from terakoya_contract.toy import VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-5
LANGUAGE: tuple[Head, ...] = ("masked", "causal", "seq2seq")
"""The heads whose only output is `logits`."""
WITH_LOGITS: tuple[Head, ...] = (*LANGUAGE, "pretraining")
"""The heads with vocabulary logits."""


class ArchitectureCase(settings.Case):
    """An architecture and a model of it, both at toy size."""

    @cached_property
    def architecture(self) -> Architecture:
        return self.settings_of(Architecture)

    def build(self, head: Head, *, seed: int = 3) -> PreTrainedModel:
        """A new model for `head` in eval mode, with the attention of a run on the CPU."""
        torch.manual_seed(seed)
        model = self.architecture.build(VOCABULARY, head)
        attention.use(model, "sdpa")
        return model.eval()

    @cached_property
    def head(self) -> Head:
        """The head of the model whose hidden states and logits are checked."""
        others: tuple[Head, ...] = ("discriminator", "body")
        for head in (*WITH_LOGITS, *others):
            if head in self.architecture.heads:
                return head
        raise CheckFailed(f"heads is {set(self.architecture.heads)}, none of which is a known head")

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model that the checks share."""
        return self.build(self.head)

    def require_head(self, head: Head) -> None:
        """Raises CheckSkipped where the model that the checks share has another head."""
        if self.head != head:
            raise CheckSkipped(f"its hidden states are checked with the head {self.head!r}")

    def length(self) -> int:
        """A row length that the model accepts, in tokens."""
        return min(self.architecture.max_sequence_length() or 24, 24)

    def row(self, *lengths: int, padding: int = 0) -> dict[str, Tensor]:
        """A row of random documents of `lengths`, with decoder inputs where the model has a decoder."""
        batch = batches.make_row(*lengths, padding=padding)
        return batches.add_target(batch) if self.head == "seq2seq" else batch

    def hidden(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The hidden states (B, T, H), or of a decoder (B, S, H), without gradients. Raises CheckFailed for another
        shape."""
        try:
            with torch.no_grad():
                hidden = self.architecture.hidden(self.model, batch)
        except TypeError as error:
            if "document_mask" not in str(error):
                raise
            raise CheckFailed(
                "hidden does not pass the model the mask that keeps documents apart; call its body with "
                "**attention.arguments(model, batch)"
            ) from error
        shape = tuple(batches.output_document_ids(batch).shape)
        if not isinstance(hidden, Tensor):
            raise CheckFailed(
                f"hidden returned {type(hidden).__name__}, expected a tensor; return "
                ".last_hidden_state of a Transformers output"
            )
        ids = "decoder_input_ids" if self.head == "seq2seq" else "input_ids"
        if hidden.ndim != 3 or tuple(hidden.shape[:2]) != shape or not hidden.is_floating_point():
            raise CheckFailed(
                f"for {ids} {shape} hidden returned {tuple(hidden.shape)} {hidden.dtype}, expected {(*shape, 'H')}"
            )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The vocabulary logits (..., V) of `hidden` (..., H). Raises CheckFailed for another shape."""
        with torch.no_grad():
            logits = self.architecture.logits(self.model, hidden)
        expected = (*hidden.shape[:-1], VOCABULARY.size)
        if not isinstance(logits, Tensor) or tuple(logits.shape) != expected:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise CheckFailed(
                f"for hidden {tuple(hidden.shape)} logits returned {got}, expected {expected}: one number for each of "
                f"the vocabulary's {VOCABULARY.size} ids, for any leading dimensions"
            )
        return logits


def check_heads(case: ArchitectureCase) -> None:
    """It declares its heads and how it keeps documents apart."""
    known = get_args(Head)
    unknown = sorted(set(case.component.heads) - set(known)) if hasattr(case.component, "heads") else []
    if unknown or not case.architecture.heads:
        raise CheckFailed(f"heads is {set(case.architecture.heads) or '{}'}; name at least one of {', '.join(known)}")
    if case.architecture.document_masking not in ("attention_interface", "mask_4d", "none"):
        raise CheckFailed(
            f"document_masking is {case.architecture.document_masking!r}, "
            'expected "attention_interface", "mask_4d" or "none"'
        )


_END_ROLES = {"bos_token_id": ("bos", "cls"), "eos_token_id": ("eos", "sep")}
"""Ids of a config -> the names in a vocabulary that they may have."""


def check_config(case: ArchitectureCase) -> None:
    """Its config is a Transformers config with the vocabulary's size and ids, which has its fields."""
    from transformers import PretrainedConfig

    config = case.architecture.config(VOCABULARY)
    if not isinstance(config, PretrainedConfig):
        raise CheckFailed(f"config returned {type(config).__name__}, expected a transformers.PretrainedConfig")
    if config.vocab_size != VOCABULARY.size:
        raise CheckFailed(
            f"its vocab_size is {config.vocab_size}, expected vocabulary.size, which is {VOCABULARY.size}"
        )
    if config.pad_token_id not in (None, VOCABULARY.pad):
        raise CheckFailed(
            f"its pad_token_id is {config.pad_token_id}, expected vocabulary.pad, which is {VOCABULARY.pad}; models "
            "ignore that id as padding"
        )
    for name, roles in _END_ROLES.items():
        id, fitting = getattr(config, name, None), [getattr(VOCABULARY, role) for role in roles]
        if id is not None and id not in fitting:
            raise CheckFailed(
                f"its {name} is {id}, expected {' or '.join(f'vocabulary.{role}' for role in roles)}, which are "
                f"{' and '.join(map(str, fitting))}; name it in `config_ids`, or leave it None"
            )
    _check_arguments(case.architecture)


def _check_arguments(architecture: Architecture) -> None:
    """Raises CheckFailed where the architecture passes its config class a name that this would ignore."""
    if not isinstance(architecture, TransformersArchitecture) or not architecture.config_class:
        return
    import transformers

    default = getattr(transformers, architecture.config_class)()
    for name in architecture.config_arguments(VOCABULARY):
        if not hasattr(default, name) and name not in architecture.undeclared_arguments:
            raise CheckFailed(
                f"{architecture.config_class} has no {name} and would ignore it (if the model reads it nevertheless, "
                f"name it in undeclared_arguments){nearest(name, {*default.to_dict(), *default.attribute_map})}"
            )


def check_build(case: ArchitectureCase) -> None:
    """It builds a Transformers model for each of its heads; the weights depend on torch's seed alone."""
    from transformers import PreTrainedModel

    for head in sorted(case.architecture.heads):
        one, same, other = (case.build(head, seed=seed) for seed in (3, 3, 4))
        if not isinstance(one, PreTrainedModel):
            raise CheckFailed(
                f"for {head} build returned {type(one).__name__}, expected a transformers.PreTrainedModel"
            )
        first, second, third = (dict(model.named_parameters()) for model in (one, same, other))
        unequal = [name for name in first if not torch.equal(first[name], second[name])]
        if unequal:
            raise CheckFailed(
                f"for {head} two models from one seed differ, in {unequal[0]}; initialise weights from torch's global "
                "generator alone"
            )
        if all(torch.equal(first[name], third[name]) for name in first):
            raise CheckFailed(f"for {head} models from two seeds are equal: its weights are not randomly initialised")


def check_shapes(case: ArchitectureCase) -> None:
    """hidden returns (B, T, H), logits (..., V)."""
    length = case.length()
    batch = {name: value.repeat(2, 1) for name, value in case.row(length).items()}
    hidden = case.hidden(batch)
    if case.head in WITH_LOGITS:
        case.logits(hidden)
        case.logits(hidden[0, :3])
    if case.head == "discriminator":
        with torch.no_grad():
            scores = case.architecture.replaced_logits(case.model, hidden)
        if tuple(scores.shape) != (2, length):
            raise CheckFailed(f"replaced_logits returned {tuple(scores.shape)}, expected (B, T), here {(2, length)}")


def check_determinism(case: ArchitectureCase) -> None:
    """Without dropout the same batch gives the same hidden states."""
    batch = case.row(case.length())
    if not torch.equal(case.hidden(batch), case.hidden(batch)):
        raise CheckFailed(
            "two calls on one batch differ although the model is in eval mode; use no randomness outside dropout"
        )


def check_gradients(case: ArchitectureCase) -> None:
    """Gradients reach every trainable weight."""
    model = case.build(case.head)
    result = case.architecture.hidden(model, case.row(case.length()))
    if not result.requires_grad:
        raise CheckFailed("hidden cannot be differentiated; is it computed under torch.no_grad, or detached?")
    if case.head in LANGUAGE:
        result = case.architecture.logits(model, result)
    elif case.head == "discriminator":
        result = case.architecture.replaced_logits(model, result)
    (result * torch.linspace(-1, 1, result.shape[-1])).sum().backward()
    weights = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    missing = sorted(name for name, gradient in weights.items() if gradient is None)
    if missing and case.head in (*LANGUAGE, "discriminator"):
        raise CheckFailed(
            f"no gradient reaches {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}: with several "
            "processes each one waits for the gradients of all weights. Build the model without these weights, or "
            "freeze them in build: model.part.requires_grad_(False)"
        )
    if not all(bool(torch.isfinite(each).all()) for each in weights.values() if each is not None):
        raise CheckFailed("a gradient is not finite")


def check_document_isolation(case: ArchitectureCase) -> None:
    """Documents in one row, and padding, do not influence each other."""
    if case.architecture.document_masking == "none":
        raise CheckSkipped('document_masking is "none": packed rows are refused, layouts "lines" and "stream" work')
    batch = case.row(5, case.length() - 12, padding=7)
    hidden = case.hidden(batch)
    for number in (0, 1):
        positions = batches.output_document_ids(batch)[0] == number
        error = difference(hidden[:, positions], case.hidden(batches.single_document(batch, number)))
        if error > TOLERANCE:
            raise CheckFailed(
                f"a document's hidden states differ by {error:.1g} when another shares its row. Pass "
                "batch['position_ids'] and **attention.arguments(model, batch) to the body (attention_interface), or a "
                "mask from attention.document_mask (mask_4d), to an encoder and to a decoder; where the model supports "
                'neither, or mixes neighbouring tokens outside its attention, set document_masking = "none"'
            )


def check_blocks(case: ArchitectureCase) -> None:
    """blocks returns the model's repeated layers."""
    blocks, modules = case.architecture.blocks(case.model), set(case.model.modules())
    if not blocks or not all(isinstance(each, nn.Module) and each in modules for each in blocks):
        raise CheckFailed("expected a list of modules of this model, such as list(model.base_model.encoder.layer)")


def check_output_layers(case: ArchitectureCase) -> None:
    """A block whose output_layers are 0 returns the hidden states that it received."""
    names = case.architecture.output_layers
    if not names:
        raise CheckSkipped("it names no output_layers")
    model, generator = case.build(case.head), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for value in model.parameters():  # norms that are not those of an untrained model
            value.add_(0.2 * torch.randn(value.shape, generator=generator))
    passed: list[tuple[Tensor, Tensor]] = []
    for block in case.architecture.blocks(model):
        layers = [module for name, module in block.named_modules() if name.split(".")[-1] in names]
        if not layers:
            raise CheckFailed(f"a block has no layer named {' or '.join(names)}")
        for value in (value for layer in layers for value in layer.parameters()):
            nn.init.zeros_(value)
        block.register_forward_hook(
            lambda _, given, kept, returned: passed.append(
                (
                    given[0] if given else kept["hidden_states"],
                    returned if isinstance(returned, Tensor) else returned[0],
                )
            ),
            with_kwargs=True,
        )
    with torch.no_grad():
        case.architecture.hidden(model, case.row(5, case.length() - 12, padding=7))
    change = max(difference(before, after) for before, after in passed)
    if change > TOLERANCE:
        raise CheckFailed(
            f"a block without output layers changes its hidden states by {change:.1e}; name all layers that add to "
            "them, or none where a norm comes after the sum"
        )


def check_tensor_partition(case: ArchitectureCase) -> None:
    """Processes that share its blocks by tensor_partition compute the same as one process."""
    models = [case.build(case.head) for _ in range(1 + 2 * partition.SIZE)]
    partition.check_partition(case.architecture, models, case.row(5, case.length() - 12, padding=7))


def check_pipeline_stages(case: ArchitectureCase) -> None:
    """Pipeline stages made by keep_stage_blocks compute one after another the same as the whole model."""
    models = [case.build(case.head) for _ in range(1 + stages.COUNT)]
    stages.check_stages(case.architecture, models, case.row(5, case.length() - 12, padding=7))


def check_compilation(case: ArchitectureCase) -> None:
    """torch.compile traces its blocks without a break, and they compute the same."""
    if case.architecture.compile_obstacle is not None:
        raise CheckSkipped(f"it says why it cannot be compiled: {case.architecture.compile_obstacle}")
    batch = case.row(5, case.length() - 12, padding=7)
    expected, model = case.hidden(batch), case.build(case.head)
    attention.use(model, attention.MASKED)
    blocks = case.architecture.blocks(model)
    compilation.compile_parts(blocks, Layout("packed"), backend=compilation.TRACE_ONLY)
    try:
        with torch.no_grad():
            error = difference(case.architecture.hidden(model, batch), expected)
    except RuntimeError as raised:
        if not compilation.is_compile_error(raised):
            raise
        raise CheckFailed(
            f"its blocks cannot be compiled: {compilation.describe(raised)}. Write that line with operations of torch "
            'alone, or say why it cannot be: compile_obstacle = "..."'
        ) from raised
    if error > TOLERANCE:
        raise CheckFailed(f"compiled blocks give other hidden states: they differ by {error:.1g}")


def check_longest_row(case: ArchitectureCase) -> None:
    """A row of max_sequence_length works."""
    length = case.architecture.max_sequence_length()
    if length is None:
        raise CheckSkipped("it has no maximum")
    try:
        case.hidden(case.row(length))
    except (IndexError, RuntimeError) as error:
        raise CheckFailed(
            f"max_sequence_length is {length}, but a row of {length} tokens fails ({error}); do position ids "
            "start above 0?"
        ) from error


CHECKS: tuple[Check, ...] = (
    check_heads, check_config, check_build, check_shapes, check_determinism, check_gradients,
    check_document_isolation, check_blocks, check_output_layers, check_compilation, check_tensor_partition,
    check_pipeline_stages, check_longest_row,
)  # fmt: skip
