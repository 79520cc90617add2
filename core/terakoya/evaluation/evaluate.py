"""Evaluating a finished model or a run: which measure fits, on which data, with which settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from terakoya.errors import UserError

if TYPE_CHECKING:
    import torch

    from terakoya.corpus.corpus import Corpus
    from terakoya.evaluation.data import DataSet
    from terakoya.evaluation.models import Subject

Measure = Literal["auto", "objective", "perplexity", "pseudo-perplexity"]
Precision = Literal["fp32", "bf16"]
LINES = 100
"""How many lines of each data set are scored token by token where no limit is given."""


@dataclass(frozen=True)
class Evaluation:
    """What came out.

    Attributes:
        model: the folder that was evaluated: for a run, its checkpoint.
        measure: `objective`, `perplexity` or `pseudo-perplexity`; "" where tasks alone were run.
        settings: what else decides the numbers.
        results: the numbers of each data set, by its name.
        tasks: the numbers of each of lm-eval's tasks.
    """

    model: Path
    measure: str
    settings: Mapping[str, Any]
    results: Mapping[str, Mapping[str, float]]
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def evaluate(
    source: Path,
    *,
    stores: Sequence[Path] = (),
    corpora: Mapping[str, Corpus] | None = None,
    measure: Measure = "auto",
    limit: int | None = None,
    length: int | None = None,
    stride: int | None = None,
    start_token: bool = True,
    batch_tokens: int = 4096,
    precision: Precision | None = None,
    device: str | None = None,
    tasks: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> Evaluation:
    """The numbers of the model in `source`: a Transformers folder, a checkpoint, or a run (its newest checkpoint).

    `auto` measures a run or checkpoint on stores by its objective, as its validation does, and anything else by
    perplexity (causal models) or pseudo-perplexity (masked models).

    Args:
        stores: token stores; of a run, those that it validates on where nothing is named.
        corpora: texts by name.
        limit: at most so many documents, lines (pseudo-perplexity) or rows (objective) of each.
        length, stride: of the windows over long documents, in tokens; defaults: what the model takes, at most 2048, and
            half of it.
        start_token: whether a document is begun with the tokenizer's BOS, or EOS where it has none, so that its first
            token is scored too.
        precision: fp32 by default; of the objective, the run's own.

    Raises:
        UserError: anything the user can mend.
    """
    import torch

    from terakoya.training.checkpoint import checkpoint

    corpora = corpora or {}
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found = _checkpoint(source)
    by_objective = measure == "objective" or (measure == "auto" and found is not None and not corpora and not tasks)
    if by_objective:
        if found is None:
            raise UserError(f"{source}: a Transformers folder has no objective; name a run or a checkpoint")
        if corpora or tasks:
            raise UserError("--measure objective: reads token stores; prepare the corpus, or leave --measure out")
        for option, value in (("--length", length), ("--stride", stride)):
            if value is not None:
                raise UserError(f"{option}: rows are as long as the run's; it is for perplexity")
        return _by_objective(found, stores, limit=limit, batch_tokens=batch_tokens, precision=precision, device=where)
    if not stores and not corpora and not tasks:
        raise UserError("nothing to evaluate on: name --data STORE, --corpus FILE or --tasks NAME")
    from terakoya.evaluation import models

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    results: Mapping[str, Mapping[str, float]] = {}
    settings: Mapping[str, Any] = {}
    if stores or corpora:
        if found is not None:
            subject = models.from_checkpoint(found, checkpoint.read_manifest(found), device=where, dtype=dtype)
        else:
            subject = models.from_folder(source, device=where, dtype=dtype, trust_remote_code=trust_remote_code)
        wanted = {"causal": "perplexity", "masked": "pseudo-perplexity"}[subject.kind]
        if measure not in ("auto", wanted):
            raise UserError(f"--measure {measure}: {type(subject.model).__name__} has no such measure, only {wanted}")
        measure = wanted  # type: ignore[assignment]
        data = _data(subject, stores, corpora)
        if subject.kind == "causal":
            results, settings = _perplexity(
                subject, data, limit=limit, length=length, stride=stride, start_token=start_token,
                batch_tokens=batch_tokens, device=where,
            )  # fmt: skip
        else:
            if stride is not None:
                raise UserError("--stride: is for causal models; lines are cut at --length")
            results, settings = _pseudo_perplexity(
                subject, data, limit=limit, length=length, batch_tokens=batch_tokens, device=where
            )
        settings = {**settings, "precision": precision or "fp32"}
    numbers: Mapping[str, Mapping[str, float]] = {}
    if tasks:
        from terakoya.evaluation import harness

        model, tokenizer = (source, source) if found is None else (found / "model", found / "tokenizer")
        if not (model / "config.json").is_file():
            raise UserError(f"{model}: no Transformers folder for lm-eval; write one with `terakoya export`")
        numbers = harness.evaluate(
            model, tokenizer if (tokenizer / "tokenizer_config.json").is_file() else model, tasks,
            limit=limit, device=str(where), dtype="bfloat16" if precision == "bf16" else "float32",
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    return Evaluation(found or source, measure if results else "", settings, results, numbers)


def _checkpoint(source: Path) -> Path | None:
    """The checkpoint that `source` means; None where it is none and no run."""
    from terakoya.conversion.export import find_checkpoint
    from terakoya.training.checkpoint import checkpoint

    if not (source / "manifest.json").is_file() and not (source / "checkpoints").is_dir():
        return None
    folder = find_checkpoint(source)
    wrong = checkpoint.find_problems(folder)
    if wrong:
        raise UserError(f"{folder}: damaged: {'; '.join(wrong[:5])}")
    return folder


def _by_objective(
    folder: Path,
    stores: Sequence[Path],
    *,
    limit: int | None,
    batch_tokens: int,
    precision: Precision | None,
    device: torch.device,
) -> Evaluation:
    from terakoya.evaluation.objective import RunObjective
    from terakoya.store.token_store import TokenStore
    from terakoya.training.checkpoint import checkpoint

    manifest = checkpoint.read_manifest(folder)
    objective = RunObjective(folder, manifest, device=device, precision=precision)
    chosen = list(stores) or list(objective.validation_stores())
    if not chosen:
        raise UserError(f"{folder}: its run validates on nothing; name a store: --data STORE")
    opened = {str(path): TokenStore.open(path) for path in chosen}
    results = {
        name: objective.evaluate(store, number=number, rows=limit, batch_tokens=batch_tokens)
        for number, (name, store) in enumerate(opened.items())
    }
    dumped = manifest["parameters"]
    settings = {
        "objective": dumped["objective"]["type"],
        "length": dumped["data"]["sequence_length"],
        "limit": limit,
        "step": manifest["step"],
        "precision": objective.precision,
    }
    return Evaluation(folder, "objective", settings, results)


def _data(subject: Subject, stores: Sequence[Path], corpora: Mapping[str, Corpus]) -> list[DataSet]:
    """The data sets, in the order in which they were named."""
    from terakoya.evaluation.data import CorpusTexts, StoreTexts, open_store
    from terakoya.evaluation.models import same_tokenizer

    def encode(text: str) -> list[int]:
        ids: list[int] = subject.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    size = subject.model.get_input_embeddings().num_embeddings
    found: list[DataSet] = []
    for folder in stores:
        store = open_store(folder, vocabulary_size=size)
        if not same_tokenizer(subject.tokenizer, store.tokenizer_folder):
            raise UserError(f"{folder}: was made with another tokenizer than the model's; prepare it with that")
        found.append(StoreTexts(str(folder), store))
    return found + [CorpusTexts(name, corpus, encode) for name, corpus in corpora.items()]


def _perplexity(
    subject: Subject,
    data: Sequence[DataSet],
    *,
    limit: int | None,
    length: int | None,
    stride: int | None,
    start_token: bool,
    batch_tokens: int,
    device: torch.device,
) -> tuple[Mapping[str, Mapping[str, float]], Mapping[str, Any]]:
    from terakoya.evaluation import causal

    window = subject.window(length)
    step = max(1, window // 2) if stride is None else stride
    if not 0 < step < window:
        raise UserError(f"--stride {step}: expected 1 to {window - 1}: windows of {window} must overlap by a token")
    start = subject.special("bos", "eos") if start_token else None
    results = {
        each.name: causal.evaluate(
            subject.model, each.texts("document", limit), start=start, pad=subject.special("pad") or 0,
            length=window, stride=step, batch_tokens=batch_tokens, device=device,
        )
        for each in data
    }  # fmt: skip
    begun = None if start is None else subject.tokenizer.convert_ids_to_tokens(start)
    return results, {"length": window, "stride": step, "start_token": begun, "limit": limit}


def _pseudo_perplexity(
    subject: Subject,
    data: Sequence[DataSet],
    *,
    limit: int | None,
    length: int | None,
    batch_tokens: int,
    device: torch.device,
) -> tuple[Mapping[str, Mapping[str, float]], Mapping[str, Any]]:
    from terakoya.evaluation import masked

    ids = {
        "before": subject.special("cls", "bos"),
        "after": subject.special("sep", "eos"),
        "mask": subject.special("mask"),
    }
    lacking = [name for name, number in ids.items() if number is None]
    if lacking:
        raise UserError(
            f"{subject.folder}: its tokenizer has no token for {', '.join(lacking)}: expected [CLS] or BOS before a "
            "line, [SEP] or EOS after it, and [MASK]"
        )
    window = subject.window(length)
    if window < 3:
        raise UserError(f"--length {window}: expected at least 3, a token between two special ones")
    limit = LINES if limit is None else limit
    results = {
        each.name: masked.evaluate(
            subject.model, each.texts("line", limit), pad=subject.special("pad") or 0, length=window,
            batch_tokens=batch_tokens, device=device, **{name: int(number or 0) for name, number in ids.items()},
        )
        for each in data
    }  # fmt: skip
    return results, {"length": window, "limit": limit}
