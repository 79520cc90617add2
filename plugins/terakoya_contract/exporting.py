"""The check of a saved model: plain Transformers loads it and computes the outputs that were trained."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from terakoya.components import Head
from terakoya.plugins import registry
from terakoya.toolkit.architectures import attention
from terakoya.toolkit.formats import model_folder
from terakoya_contract import batches, toy
from terakoya_contract.architecture import TOLERANCE, WITH_LOGITS, ArchitectureCase
from terakoya_contract.batches import difference
from terakoya_contract.results import Check, CheckFailed, CheckSkipped

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
"""The Transformers class that loads the model of each head."""


SCALES = (1.0, 30.0)
"""Factors of the matrices of blocks. New weights give attention scores so near 0 that a soft cap of them changes
nothing; scores are of the order of 10 with the larger factor."""


_WHOLE = (
    "Either they do not compute what the model's own forward computes (often its positions: RoBERTa's and its "
    "relatives' begin after the padding id), or loading initialises a weight anew"
)
_PADDED = (
    "Without padding the numbers agree, so look at what hidden does at padding: a model that adds its attention mask "
    "needs 0 at tokens and a large negative number at padding, not 1 and 0; and positions, or a convolution over "
    "neighbours, may count padding in"
)
"""The likely causes of other numbers, on a document without padding and on one with it. The first is tried first."""


def check_saved_model(case: ArchitectureCase) -> None:
    """A saved model loads with plain Transformers and gives the logits that were trained, with large weights too."""
    for head, scale in itertools.product(sorted(case.architecture.heads), SCALES):
        model = case.build(head)
        matrices = {id(each): each for block in case.architecture.blocks(model) for each in block.parameters()}
        for weight in model.parameters():  # as training does: every row of an embedding changes
            weight.data.add_(torch.randn_like(weight), alpha=0.02)
            if weight.ndim > 1 and id(weight) in matrices:
                weight.data.mul_(scale)
        rows = [batches.make_row(case.length()), batches.make_row(case.length() - 5, padding=5)]
        rows[1]["input_ids"][rows[1]["document_ids"] < 0] = toy.PAD
        if head == "seq2seq":
            rows = [batches.add_target(batch) for batch in rows]
        trained = [_trained_output(case, model, head, batch) for batch in rows]
        attention.release(model)
        # a discriminator may be a token classifier
        is_classifier = type(model).__name__.endswith("TokenClassification")
        auto = "AutoModelForTokenClassification" if is_classifier else AUTO[head]
        with tempfile.TemporaryDirectory() as folder:
            model_folder.write(model, Path(folder))
            loaded = _load(Path(folder), auto, type(model)._auto_class)
        for batch, expected in zip(rows, trained, strict=True):
            given = {"input_ids": batch["input_ids"], "attention_mask": (batch["document_ids"] >= 0).long()}
            if head == "seq2seq":
                given["decoder_input_ids"] = batch["decoder_input_ids"]
            with torch.no_grad():
                output = loaded(**given)
            real = batches.output_document_ids(batch) >= 0
            got = output[0] if getattr(output, "logits", None) is None else output.logits
            if head == "discriminator" and got.shape == (*expected.shape, 2):  # a token classifier's two classes
                got = got[..., 1] - got[..., 0]
            padding = int((~real).sum())
            if got.shape != expected.shape:
                raise CheckFailed(
                    f"for {head}, {type(loaded).__name__} returns {tuple(got.shape)}, hidden and logits return "
                    f"{tuple(expected.shape)}"
                )
            if difference(got[real], expected[real]) > TOLERANCE:
                most = ""
                if head in WITH_LOGITS:
                    column = int((got[real] - expected[real]).abs().flatten(0, -2).amax(0).argmax())
                    most = f" (the most in the logit of vocabulary id {column}; the padding id is {toy.PAD})"
                raise CheckFailed(
                    f"for {head}, {type(loaded).__name__} returns other numbers on a document with {padding} padding "
                    f"tokens than hidden and logits do{most}. {_PADDED if padding else _WHOLE}; the matrices of its "
                    f"blocks were multiplied by {scale:g}"
                )


def _trained_output(case: ArchitectureCase, model: PreTrainedModel, head: Head, batch: Mapping[str, Tensor]) -> Tensor:
    """The output that objectives train with `head`: logits, or hidden states where it has none."""
    with torch.no_grad():
        hidden = case.architecture.hidden(model, batch)
        if head in WITH_LOGITS:
            return case.architecture.logits(model, hidden)
        return case.architecture.replaced_logits(model, hidden) if head == "discriminator" else hidden


def _load(folder: Path, auto: str, own: str | None) -> PreTrainedModel:
    """Loads the model in `folder` with plain Transformers: by its class `auto`, or by `own` with the model's own code.
    Raises CheckFailed where that fails."""
    import transformers

    try:
        loaded, report = getattr(transformers, own or auto).from_pretrained(
            folder, local_files_only=True, trust_remote_code=own is not None, output_loading_info=True
        )
    except (ValueError, OSError, AttributeError, ImportError) as error:
        raise CheckFailed(
            f"{own or auto} does not load it: {' '.join(str(error).split())[:300]}. A model that Transformers does not "
            "have is exported with its code: see the end of docs/reference/plugins.md"
        ) from error
    mismatched = sorted(report["missing_keys"]) + sorted(report["unexpected_keys"])
    if mismatched:
        raise CheckFailed(f"{own or auto} reports missing or unexpected weights: {', '.join(mismatched[:5])}")
    return loaded.eval()


def check_long_texts(case: ArchitectureCase) -> None:
    """`tokenizer(text, truncation=True)` of an export cuts any text to a length that the model accepts."""
    import transformers

    if "huggingface" not in registry().names("exporters"):
        raise CheckSkipped("the exporter huggingface is not installed")
    model = case.build(case.head)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        registry().component("exporters", "huggingface")().export(
            {"": model}, toy.make_tokenizer(Path(temporary) / "tokenizer"), folder
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    inputs = tokenizer("w1 w2 " * (LONG_TEXT // 6), truncation=True, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    given = {"decoder_input_ids": inputs["input_ids"][:, :2]} if case.head == "seq2seq" else {}
    try:
        with torch.no_grad():
            model(**inputs, **given)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckFailed(
            f"the exported tokenizer cuts a text of {LONG_TEXT:,} characters to {length:,} tokens, which the model "
            f"does not accept ({reason}); its config needs max_position_embeddings, and its forward the tokenizer's "
            "inputs"
        ) from error


LONG_TEXT = 10_000
"""Characters of a text that is longer than the toy model's positions."""
CHECKS: tuple[Check, ...] = (check_saved_model, check_long_texts)
