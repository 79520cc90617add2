"""What an architecture promises of its export: plain Transformers loads it, and gives the numbers that were trained."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from terakoya.components import Head
from terakoya.contract import batches, toy
from terakoya.contract.architecture import TOLERANCE, WITH_LOGITS, Subject
from terakoya.contract.batches import difference
from terakoya.contract.findings import Check, Wrong
from terakoya.toolkit.architectures import attention
from terakoya.toolkit.formats import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AUTO = {
    "masked": "AutoModelForMaskedLM",
    "pretraining": "AutoModelForPreTraining",
    "causal": "AutoModelForCausalLM",
    "discriminator": "AutoModelForPreTraining",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "body": "AutoModel",
}
"""The Transformers class that loads what is built for each head."""


def exported(subject: Subject) -> None:
    """What is saved loads with plain Transformers and gives the logits that were trained."""
    for head in sorted(subject.architecture.heads):
        model = subject.build(head)
        for weight in model.parameters():  # as training does it: no row of an embedding stays what it was
            weight.data.add_(torch.randn_like(weight), alpha=0.02)
        both = [batches.row(subject.length()), batches.row(subject.length() - 5, padding=5)]
        both[1]["input_ids"][both[1]["document_ids"] < 0] = toy.PAD
        if head == "seq2seq":
            both = [batches.with_target(batch) for batch in both]
        ours = [_trained_output(subject, model, head, batch) for batch in both]
        attention.release(model)
        with tempfile.TemporaryDirectory() as folder:
            model_folder.write(model, Path(folder))
            loaded = _loaded(Path(folder), _auto(head, model), type(model)._auto_class)
        for batch, expected in zip(both, ours, strict=True):
            given = {"input_ids": batch["input_ids"], "attention_mask": (batch["document_ids"] >= 0).long()}
            if head == "seq2seq":
                given["decoder_input_ids"] = batch["decoder_input_ids"]
            with torch.no_grad():
                output = loaded(**given)
            real = batches.answered(batch) >= 0
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
        if head in WITH_LOGITS:
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


CHECKS: tuple[Check, ...] = (exported,)
