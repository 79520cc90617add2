"""Perplexity of causal models, pseudo-perplexity of masked ones, on corpora and token stores."""

from __future__ import annotations

import torch

from terakoya.components.tokenizer import encode_texts, load_tokenizer
from terakoya.errors import UserError
from terakoya.runs.checkpoints import read_manifest
from terakoya.store.tokenizer_identity import describe_different_ids
from terakoya.tokenization.train import check_has_documents
from terakoya_evaluation import causal, masked, models
from terakoya_evaluation.data import CorpusTexts, DataSet, StoreTexts, open_store
from terakoya_evaluation.models import EvaluatedModel
from terakoya_evaluation.options import EvaluateOptions
from terakoya_evaluation.result import Evaluation


def measure_texts(options: EvaluateOptions, device: torch.device) -> Evaluation:
    """Returns the loss and the perplexity that fit the options' model, on their stores and corpora. Raises UserError if
    the model, the data and the options do not fit together."""
    checkpoint = options.checkpoint()
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    if checkpoint is not None:
        model = models.load_checkpoint(checkpoint, read_manifest(checkpoint), device=device, dtype=dtype)
    else:
        trust = options.trust_remote_code
        model = models.load_folder(options.source, device=device, dtype=dtype, trust_remote_code=trust)
    fitting = "perplexity" if model.kind == "causal" else "pseudo-perplexity"
    if options.measure not in ("auto", fitting):
        raise UserError(
            f"--measure {options.measure}: {type(model.model).__name__} has no such measure, only {fitting}"
        )
    measure = causal.measure if model.kind == "causal" else masked.measure
    results, settings = measure(model, open_data_sets(model, options), options)
    settings = {**settings, "precision": options.model_precision}
    return Evaluation(checkpoint or options.source, fitting, settings, results)


def open_data_sets(model: EvaluatedModel, options: EvaluateOptions) -> list[DataSet]:
    """Opens the data sets, stores first, in the order in which they were named. Raises UserError for a corpus without
    a document, and for a store that does not fit the model."""

    def encode(text: str) -> list[int]:
        encoded = encode_texts(lambda texts: model.tokenizer(texts[0], add_special_tokens=False, verbose=False), [text])
        ids: list[int] = encoded["input_ids"]
        return ids

    corpora = options.texts()
    for corpus in corpora.values():
        check_has_documents(corpus)
    size = model.model.get_input_embeddings().num_embeddings
    data_sets: list[DataSet] = []
    for folder in options.stores:
        store = open_store(folder, vocabulary_size=size)
        theirs = load_tokenizer(store.tokenizer_folder).get_vocab()
        if different := describe_different_ids(model.tokenizer.get_vocab(), theirs, model.folder, folder):
            raise UserError(
                f"{folder}: was prepared with another tokenizer than the model's ({different}); prepare it with that"
            )
        data_sets.append(StoreTexts(str(folder), store))
    return data_sets + [CorpusTexts(name, corpus, encode) for name, corpus in corpora.items()]
