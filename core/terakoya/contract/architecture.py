"""What an architecture promises: it is built from the seed alone, learns everywhere, keeps documents apart.

Letters in shapes: B rows, T positions, S positions of a decoder, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor, nn

from terakoya.components import Architecture, Head
from terakoya.contract import batches, partition, settings, stages
from terakoya.contract.batches import difference
from terakoya.contract.findings import Check, NotLookedAt, Wrong
from terakoya.contract.toy import VOCABULARY
from terakoya.toolkit.architectures import attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-5
LANGUAGE: tuple[Head, ...] = ("masked", "causal", "seq2seq")
"""The heads that `logits` is all of."""
WITH_LOGITS: tuple[Head, ...] = (*LANGUAGE, "pretraining")
"""The heads that `logits` is for."""


class Subject(settings.Subject):
    """An architecture, and a model of it at toy size."""

    @cached_property
    def architecture(self) -> Architecture:
        """At toy size."""
        found = self.settings()
        assert isinstance(found, Architecture)
        return found

    def build(self, head: Head, *, seed: int = 3) -> PreTrainedModel:
        """A fresh model for `head`, attention as in a run on the CPU, no dropout."""
        torch.manual_seed(seed)
        model = self.architecture.build(VOCABULARY, head)
        attention.use(model, "sdpa")
        return model.eval()

    @cached_property
    def head(self) -> Head:
        """The head that hidden states and logits are looked at with."""
        others: tuple[Head, ...] = ("discriminator", "body")
        for head in (*WITH_LOGITS, *others):
            if head in self.architecture.heads:
                return head
        raise Wrong(f"heads is {set(self.architecture.heads)}, of which none is known")

    @cached_property
    def model(self) -> PreTrainedModel:
        """One model for all looks."""
        return self.build(self.head)

    def length(self) -> int:
        """A row's length that the model takes."""
        return min(self.architecture.max_sequence_length() or 24, 24)

    def row(self, *lengths: int, padding: int = 0) -> dict[str, Tensor]:
        """A row of random documents of `lengths`, as the model takes it: with what its decoder reads, if it has one."""
        batch = batches.row(*lengths, padding=padding)
        return batches.with_target(batch) if self.head == "seq2seq" else batch

    def hidden(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The hidden states (B, T, H), of a decoder (B, S, H), without gradients. Raises Wrong for another shape."""
        try:
            with torch.no_grad():
                hidden = self.architecture.hidden(self.model, batch)
        except TypeError as error:
            if "document_mask" not in str(error):
                raise
            raise Wrong(
                "hidden does not hand the model what keeps documents apart; call its body with "
                "**attention.arguments(model, batch)"
            ) from error
        shape = tuple(batches.answered(batch).shape)
        if not isinstance(hidden, Tensor):
            raise Wrong(
                f"hidden returned {type(hidden).__name__}, expected a tensor; of a Transformers output take "
                ".last_hidden_state"
            )
        ids = "decoder_input_ids" if self.head == "seq2seq" else "input_ids"
        if hidden.ndim != 3 or tuple(hidden.shape[:2]) != shape or not hidden.is_floating_point():
            raise Wrong(
                f"for {ids} {shape} hidden returned {tuple(hidden.shape)} {hidden.dtype}, expected {(*shape, 'H')}"
            )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The vocabulary logits (..., V) of `hidden` (..., H). Raises Wrong for another shape."""
        with torch.no_grad():
            logits = self.architecture.logits(self.model, hidden)
        expected = (*hidden.shape[:-1], VOCABULARY.size)
        if not isinstance(logits, Tensor) or tuple(logits.shape) != expected:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise Wrong(
                f"of hidden {tuple(hidden.shape)} logits returned {got}, expected {expected}: one number for each of "
                f"the vocabulary's {VOCABULARY.size} ids, whatever stands before the last dimension"
            )
        return logits


def heads(subject: Subject) -> None:
    """It says which heads it has and how it keeps documents apart."""
    known = get_args(Head)
    wrong = sorted(set(subject.component.heads) - set(known)) if hasattr(subject.component, "heads") else []
    if wrong or not subject.architecture.heads:
        raise Wrong(f"heads is {set(subject.architecture.heads) or '{}'}; name at least one of {', '.join(known)}")
    if subject.architecture.isolation not in ("interface", "mask4d", "none"):
        raise Wrong(f'isolation is {subject.architecture.isolation!r}, expected "interface", "mask4d" or "none"')


def config(subject: Subject) -> None:
    """Its config is Transformers', with the vocabulary's size and padding id."""
    from transformers import PretrainedConfig

    config = subject.architecture.config(VOCABULARY)
    if not isinstance(config, PretrainedConfig):
        raise Wrong(f"config returned {type(config).__name__}, expected a transformers.PretrainedConfig")
    if config.vocab_size != VOCABULARY.size:
        raise Wrong(f"its vocab_size is {config.vocab_size}, expected vocabulary.size, which is {VOCABULARY.size}")
    if config.pad_token_id not in (None, VOCABULARY.pad):
        raise Wrong(
            f"its pad_token_id is {config.pad_token_id}, expected vocabulary.pad, which is {VOCABULARY.pad}; models "
            "treat that id as no text"
        )


def builds(subject: Subject) -> None:
    """It builds a Transformers model for each of its heads, from torch's seed alone."""
    from transformers import PreTrainedModel

    for head in sorted(subject.architecture.heads):
        one, same, other = (subject.build(head, seed=seed) for seed in (3, 3, 4))
        if not isinstance(one, PreTrainedModel):
            raise Wrong(f"for {head} build returned {type(one).__name__}, expected a transformers.PreTrainedModel")
        first, second, third = (dict(model.named_parameters()) for model in (one, same, other))
        unequal = [name for name in first if not torch.equal(first[name], second[name])]
        if unequal:
            raise Wrong(
                f"for {head} two models from one seed differ, in {unequal[0]}; draw weights from torch's global "
                "generator alone"
            )
        if all(torch.equal(first[name], third[name]) for name in first):
            raise Wrong(f"for {head} models from two seeds are equal: its weights are not drawn at random")


def shapes(subject: Subject) -> None:
    """hidden gives (B, T, H), logits (..., V)."""
    length = subject.length()
    batch = {name: value.repeat(2, 1) for name, value in subject.row(length).items()}
    hidden = subject.hidden(batch)
    if subject.head in WITH_LOGITS:
        subject.logits(hidden)
        subject.logits(hidden[0, :3])
    if subject.head == "discriminator":
        with torch.no_grad():
            scores = subject.architecture.replaced_logits(subject.model, hidden)
        if tuple(scores.shape) != (2, length):
            raise Wrong(f"replaced_logits returned {tuple(scores.shape)}, expected (B, T), here {(2, length)}")


def deterministic(subject: Subject) -> None:
    """Without dropout the same batch gives the same hidden states."""
    batch = subject.row(subject.length())
    if not torch.equal(subject.hidden(batch), subject.hidden(batch)):
        raise Wrong("two calls on one batch differ although the model is in eval mode; draw nothing outside dropout")


def gradients(subject: Subject) -> None:
    """Gradients reach every weight that may be trained."""
    model = subject.build(subject.head)
    result = subject.architecture.hidden(model, subject.row(subject.length()))
    if not result.requires_grad:
        raise Wrong("hidden cannot be differentiated; is it computed under torch.no_grad, or detached?")
    if subject.head in LANGUAGE:
        result = subject.architecture.logits(model, result)
    elif subject.head == "discriminator":
        result = subject.architecture.replaced_logits(model, result)
    (result * torch.linspace(-1, 1, result.shape[-1])).sum().backward()
    weights = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    missed = sorted(name for name, gradient in weights.items() if gradient is None)
    if missed and subject.head in (*LANGUAGE, "discriminator"):
        raise Wrong(
            f"no gradient arrives at {', '.join(missed[:5])}{', ...' if len(missed) > 5 else ''}: with several "
            "processes each waits for all of them. Build the model without these, or freeze them in build: "
            "model.part.requires_grad_(False)"
        )
    if not all(bool(torch.isfinite(each).all()) for each in weights.values() if each is not None):
        raise Wrong("a gradient is not finite")


def isolated(subject: Subject) -> None:
    """Documents in one row, and padding, do not change each other."""
    if subject.architecture.isolation == "none":
        raise NotLookedAt('isolation is "none": packed rows are refused, layouts "lines" and "stream" work')
    batch = subject.row(5, subject.length() - 12, padding=7)
    hidden = subject.hidden(batch)
    for number in (0, 1):
        here = batches.answered(batch)[0] == number
        found = difference(hidden[:, here], subject.hidden(batches.alone(batch, number)))
        if found > TOLERANCE:
            raise Wrong(
                f"a document's hidden states differ by {found:.1g} when another shares its row. Hand "
                "batch['position_ids'] and **attention.arguments(model, batch) to the body (interface), or a mask made "
                "of attention.document_mask (mask4d), an encoder's and a decoder's too; where the model can do "
                'neither, say isolation = "none"'
            )


def blocks(subject: Subject) -> None:
    """blocks gives the model's repeated parts."""
    found, inside = subject.architecture.blocks(subject.model), set(subject.model.modules())
    if not found or not all(isinstance(each, nn.Module) and each in inside for each in found):
        raise Wrong("expected a list of modules of this model, such as list(model.base_model.encoder.layer)")


def shared(subject: Subject) -> None:
    """Processes that share its blocks by tensor_partition compute what one does."""
    models = [subject.build(subject.head) for _ in range(1 + partition.SIZE)]
    partition.check(subject.architecture, models, subject.row(5, subject.length() - 12, padding=7))


def staged(subject: Subject) -> None:
    """Stages of a pipeline, which it is cut into by cut, compute one after another what the whole does."""
    models = [subject.build(subject.head) for _ in range(1 + stages.COUNT)]
    stages.check(subject.architecture, models, subject.row(5, subject.length() - 12, padding=7))


def longest(subject: Subject) -> None:
    """A row of max_sequence_length works."""
    length = subject.architecture.max_sequence_length()
    if length is None:
        raise NotLookedAt("it has no bound")
    try:
        subject.hidden(subject.row(length))
    except (IndexError, RuntimeError) as error:
        raise Wrong(
            f"max_sequence_length says {length}, but a row of {length} tokens does not work ({error}); do positions "
            "begin above 0?"
        ) from error


CHECKS: tuple[Check, ...] = (
    heads, config, builds, shapes, deterministic, gradients, isolated, blocks, shared, staged, longest
)  # fmt: skip
