"""What an architecture promises: it is built from the seed alone, keeps documents apart, and is exported exactly.

Letters in shapes: B rows, T positions, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor, nn

from terakoya import attention, model_folder
from terakoya.components import Architecture, Head
from terakoya.contract import settings, toy
from terakoya.contract.findings import Check, NotLookedAt, Wrong
from terakoya.contract.toy import VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-5
AUTO = {
    "masked": "AutoModelForMaskedLM",
    "pretraining": "AutoModelForPreTraining",
    "causal": "AutoModelForCausalLM",
    "discriminator": "AutoModelForPreTraining",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "body": "AutoModel",
}
"""The Transformers class that loads what is built for each head."""


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
        for head in ("masked", "causal", "pretraining", "discriminator", "body"):
            if head in self.architecture.heads:
                return head
        raise NotLookedAt("its heads take other batches than rows of tokens; its objective's checks train it")

    @cached_property
    def model(self) -> PreTrainedModel:
        """One model for all looks."""
        return self.build(self.head)

    def length(self) -> int:
        """A row's length that the model takes."""
        return min(self.architecture.max_sequence_length() or 24, 24)

    def hidden(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The hidden states (B, T, H) without gradients. Raises Wrong for another shape."""
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
        shape = tuple(batch["input_ids"].shape)
        if not isinstance(hidden, Tensor):
            raise Wrong(
                f"hidden returned {type(hidden).__name__}, expected a tensor; of a Transformers output take "
                ".last_hidden_state"
            )
        if hidden.ndim != 3 or tuple(hidden.shape[:2]) != shape or not hidden.is_floating_point():
            raise Wrong(
                f"for input_ids {shape} hidden returned {tuple(hidden.shape)} {hidden.dtype}, expected {(*shape, 'H')}"
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


def row(*lengths: int, padding: int = 0, seed: int = 1) -> dict[str, Tensor]:
    """A row of random documents of `lengths`, then `padding` places with random ids too."""
    first, draw = len(VOCABULARY.special), torch.Generator().manual_seed(seed)
    total = sum(lengths) + padding
    documents = [torch.full((length,), number) for number, length in enumerate(lengths)]
    return {
        "input_ids": torch.randint(first, VOCABULARY.size, (1, total), generator=draw),
        "document_ids": torch.cat([*documents, torch.full((padding,), -1)])[None],
        "position_ids": torch.cat([torch.arange(each) for each in (*lengths, padding)])[None],
    }


def difference(one: Tensor, other: Tensor) -> float:
    """The largest, relative to the larger of 1 and the largest value."""
    return float((one - other).abs().max() / max(1.0, float(other.abs().max())))


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
    batch = {name: value.repeat(2, 1) for name, value in row(length).items()}
    hidden = subject.hidden(batch)
    if subject.head in ("masked", "causal", "pretraining"):
        subject.logits(hidden)
        subject.logits(hidden[0, :3])
    if subject.head == "discriminator":
        with torch.no_grad():
            scores = subject.architecture.replaced_logits(subject.model, hidden)
        if tuple(scores.shape) != (2, length):
            raise Wrong(f"replaced_logits returned {tuple(scores.shape)}, expected (B, T), here {(2, length)}")


def deterministic(subject: Subject) -> None:
    """Without dropout the same batch gives the same hidden states."""
    batch = row(subject.length())
    if not torch.equal(subject.hidden(batch), subject.hidden(batch)):
        raise Wrong("two calls on one batch differ although the model is in eval mode; draw nothing outside dropout")


def gradients(subject: Subject) -> None:
    """Gradients reach every weight that may be trained."""
    model = subject.build(subject.head)
    result = subject.architecture.hidden(model, row(subject.length()))
    if not result.requires_grad:
        raise Wrong("hidden cannot be differentiated; is it computed under torch.no_grad, or detached?")
    if subject.head in ("masked", "causal"):
        result = subject.architecture.logits(model, result)
    elif subject.head == "discriminator":
        result = subject.architecture.replaced_logits(model, result)
    (result * torch.linspace(-1, 1, result.shape[-1])).sum().backward()
    weights = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    missed = sorted(name for name, gradient in weights.items() if gradient is None)
    if missed and subject.head in ("masked", "causal", "discriminator"):
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
    second = subject.length() - 12
    batch = row(5, second, padding=7)
    hidden = subject.hidden(batch)
    for start, stop in ((0, 5), (5, 5 + second)):
        alone = subject.hidden({name: value[:, start:stop] for name, value in batch.items()})
        found = difference(hidden[:, start:stop], alone)
        if found > TOLERANCE:
            raise Wrong(
                f"a document's hidden states differ by {found:.1g} when another shares its row. Hand "
                "batch['position_ids'] and **attention.arguments(model, batch) to the body (interface), or a mask made "
                'of attention.document_mask (mask4d); where the model can do neither, say isolation = "none"'
            )


def blocks(subject: Subject) -> None:
    """blocks gives the model's repeated parts."""
    found, inside = subject.architecture.blocks(subject.model), set(subject.model.modules())
    if not found or not all(isinstance(each, nn.Module) and each in inside for each in found):
        raise Wrong("expected a list of modules of this model, such as list(model.base_model.encoder.layer)")


def longest(subject: Subject) -> None:
    """A row of max_sequence_length works."""
    length = subject.architecture.max_sequence_length()
    if length is None:
        raise NotLookedAt("it has no bound")
    try:
        subject.hidden(row(length))
    except (IndexError, RuntimeError) as error:
        raise Wrong(
            f"max_sequence_length says {length}, but a row of {length} tokens does not work ({error}); do positions "
            "begin above 0?"
        ) from error


def exported(subject: Subject) -> None:
    """What is saved loads with plain Transformers and gives the logits that were trained."""
    for head in sorted(subject.architecture.heads - {"seq2seq"}):
        model = subject.build(head)
        for weight in model.parameters():  # as training does it: no row of an embedding stays what it was
            weight.data.add_(torch.randn_like(weight), alpha=0.02)
        batches = [row(subject.length()), row(subject.length() - 5, padding=5)]
        batches[1]["input_ids"][batches[1]["document_ids"] < 0] = toy.PAD
        ours = [_trained_output(subject, model, head, batch) for batch in batches]
        attention.release(model)
        with tempfile.TemporaryDirectory() as folder:
            model_folder.write(model, Path(folder))
            loaded = _loaded(Path(folder), _auto(head, model), type(model)._auto_class)
        for batch, expected in zip(batches, ours, strict=True):
            real = batch["document_ids"] >= 0
            with torch.no_grad():
                output = loaded(input_ids=batch["input_ids"], attention_mask=real.long())
            got = output[0] if getattr(output, "logits", None) is None else output.logits
            if head == "discriminator" and got.shape == (*expected.shape, 2):  # a token classifier's two classes
                got = got[..., 1] - got[..., 0]
            padding = int((~real).sum())
            if got.shape != expected.shape:
                raise Wrong(
                    f"for {head}, {type(loaded).__name__} makes {tuple(got.shape)}, hidden and logits make "
                    f"{tuple(expected.shape)}"
                )
            if difference(got[real], expected[real]) > TOLERANCE:
                place = int((got[real] - expected[real]).abs().flatten(1).amax(0).argmax())
                raise Wrong(
                    f"for {head}, {type(loaded).__name__} gives other numbers on a document with {padding} places of "
                    f"padding than hidden and logits do (most so in column {place}; id {toy.PAD} is padding). Either "
                    "they do not compute what the model's own forward computes, or loading draws a weight anew"
                )


def _auto(head: Head, model: PreTrainedModel) -> str:
    """The Transformers class that loads `model`: of a discriminator that is a token classifier the one of those."""
    return "AutoModelForTokenClassification" if type(model).__name__.endswith("TokenClassification") else AUTO[head]


def _trained_output(subject: Subject, model: PreTrainedModel, head: Head, batch: Mapping[str, Tensor]) -> Tensor:
    """What objectives train of `head`: logits, or hidden states where there is no head."""
    with torch.no_grad():
        hidden = subject.architecture.hidden(model, batch)
        if head in ("masked", "causal", "pretraining"):
            return subject.architecture.logits(model, hidden)
        return subject.architecture.replaced_logits(model, hidden) if head == "discriminator" else hidden


def _loaded(folder: Path, auto: str, own: str | None) -> PreTrainedModel:
    """The model in `folder` as plain Transformers loads it, by `own` with its own code. Raises Wrong if it does not."""
    import transformers

    try:
        loaded, report = getattr(transformers, own or auto).from_pretrained(
            folder, local_files_only=True, trust_remote_code=own is not None, output_loading_info=True
        )
    except (ValueError, OSError, AttributeError, ImportError) as error:
        raise Wrong(
            f"{own or auto} does not load it: {' '.join(str(error).split())[:300]}. A model that Transformers does not "
            "have travels with its code: see the last page of plugins/README.md"
        ) from error
    lacking = sorted(report["missing_keys"]) + sorted(report["unexpected_keys"])
    if lacking:
        raise Wrong(f"{own or auto} misses weights or finds some too many: {', '.join(lacking[:5])}")
    return loaded.eval()


CHECKS: tuple[Check, ...] = (
    heads, config, builds, shapes, deterministic, gradients, isolated, blocks, longest, exported
)  # fmt: skip
