"""Evaluates a finished model or a run: chooses the measure, the data and the settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found
from terakoya.runs.checkpoints import read_manifest, while_kept
from terakoya.runs.finding import find_checkpoint, names_checkpoint

if TYPE_CHECKING:
    import torch

    from terakoya.corpus.corpus import Corpus
    from terakoya_quality.evaluation.data import DataSet
    from terakoya_quality.evaluation.models import EvaluatedModel
    from terakoya_quality.finetuning.benchmark import Watch

Measure = Literal["auto", "objective", "perplexity", "pseudo-perplexity"]
Precision = Literal["fp32", "bf16"]
LINES = 100
"""Default number of lines of each data set for pseudo-perplexity."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        model: the folder that was evaluated; for a run, its checkpoint.
        measure: `objective`, `perplexity`, `pseudo-perplexity`, `fine-tuning` or `embedding`; "" if only tasks of
            lm-eval were run.
        settings: the other settings that decide the numbers.
        results: data set -> its numbers.
        tasks: task of lm-eval -> its numbers.
        finetuned: task of a suite or of mteb -> its result, see `finetuning/benchmark.py` and `embedding.py`.
        skipped: task of a suite or of mteb -> why it was not done.
    """

    model: Path
    measure: str
    settings: Mapping[str, Any]
    results: Mapping[str, Mapping[str, float]]
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    finetuned: Mapping[str, Any] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the evaluation as a JSON object; infinity and NaN, which JSON does not have, become null."""

        def finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
            return {name: value if math.isfinite(value) else None for name, value in numbers.items()}

        return {
            "model": str(self.model),
            "measure": self.measure,
            "settings": dict(self.settings),
            "results": [{"data": name, **finite(numbers)} for name, numbers in self.results.items()],
            "tasks": {name: finite(numbers) for name, numbers in self.tasks.items()},
            **({"finetuned": dict(self.finetuned), "skipped": dict(self.skipped)} if self.finetuned else {}),
        }


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
    tuning: Mapping[str, Any] | None = None,
    watch: Callable[[str], AbstractContextManager[Watch]] | None = None,
) -> Evaluation:
    """Evaluates the model in `source`: a Transformers folder, a checkpoint, a run (its newest whole checkpoint), or
    RUN@STEP.

    The measure `auto` evaluates a run or checkpoint on stores by its objective, as its validation does, and everything
    else by perplexity (causal models) or pseudo-perplexity (masked models).

    Args:
        stores: token stores; by default, a run is evaluated on its validation stores.
        corpora: name -> texts.
        limit: largest number of documents, lines (pseudo-perplexity) or rows (objective) of each data set.
        length, stride: of the windows over long documents, in tokens; by default the longest rows of training, of a
            run or checkpoint, else the model's limit, at most 2048; and half of that. For suites, `length` is the
            largest number of tokens of an input.
        start_token: whether to begin each document with the tokenizer's BOS, or EOS if it has no BOS, so that the
            first token is scored too.
        batch_tokens: largest number of positions in a batch, with padding.
        precision: by default fp32; for the objective, the run's own, of an fp8 run bf16.
        device: by default the first GPU, or the CPU.
        tasks: names of lm-eval's tasks; or suites, their tasks and suite files, for which the model is fine-tuned, and
            `stores` is the folder with their files; or benchmarks of mteb and their tasks, see `embedding.BENCHMARKS`.
        trust_remote_code: whether to run Python code that the folder contains.
        tuning: settings of the fine-tuning that replace those of the suites.
        watch: (title of a task) -> who follows its trainings.

    Raises:
        UserError: the arguments, the model or the data do not fit together.
    """
    import torch

    from terakoya.inference.loading import find_device
    from terakoya.inference.padded_attention import use_safe_attention
    from terakoya_quality.evaluation.embedding import is_embedding_task, measure_embedding
    from terakoya_quality.evaluation.suites import measure_suites
    from terakoya_quality.finetuning.settings import SHORTEST
    from terakoya_quality.finetuning.suites import is_suite_task

    use_safe_attention()  # also for the models of checkpoints and of lm-eval, which no loader here loads
    corpora = corpora or {}
    torch_device = find_device(device, precision=precision or "fp32")
    if torch_device.type == "mps":
        raise UserError(
            f"--device {device}: losses are added up in float64, which Apple's GPU (MPS) does not have; "
            "use --device cpu"
        )
    checkpoint_folder = find_checkpoint(source) if names_checkpoint(source) else None
    if any(is_embedding_task(task) for task in tasks):
        others: dict[str, Any] = {_option(name): value for name, value in (tuning or {}).items()}
        batch_size = others.pop("--batch-size", None)
        others |= {"--data": stores, "--corpus": corpora, "--limit": limit, "--stride": stride}
        measured, deciding = measure_embedding(
            source, tasks, not_for_it=others, length=length, batch_size=batch_size, device=torch_device,
            precision=precision or "fp32", trust=trust_remote_code, watch=watch,
        )  # fmt: skip
        return Evaluation(source, "embedding", deciding, {}, finetuned=measured.finetuned, skipped=measured.skipped)
    if any(is_suite_task(task) for task in tasks):
        if stride is not None:
            raise UserError("--stride: is for perplexity; suites say themselves how long texts are cut")
        if length is not None and length < SHORTEST:
            raise UserError(f"--length {length}: expected {SHORTEST} or more for tasks of suites")
        tuning = {**(tuning or {}), **({} if length is None else {"max_length": length})}
        measured, deciding = measure_suites(
            source, tasks, stores, corpora=corpora, tuning=tuning, limit=limit, device=torch_device,
            precision=precision or "fp32", trust=trust_remote_code, watch=watch,
        )  # fmt: skip
        return Evaluation(source, "fine-tuning", deciding, {}, finetuned=measured.finetuned, skipped=measured.skipped)
    if tuning:
        raise UserError(f"{_option(next(iter(tuning)))}: is for --tasks of a suite, such as jglue")
    if checkpoint_folder is None and not source.exists():
        there = describe_found(source, "Transformers model")
        raise UserError(f"{source}: expected a Transformers folder, a checkpoint or a run, got {there}")
    by_objective = measure == "objective" or (
        measure == "auto" and checkpoint_folder is not None and not corpora and not tasks
    )
    if by_objective:
        if checkpoint_folder is None:
            raise UserError(f"{source}: a Transformers folder has no objective; name a run or a checkpoint")
        if corpora or tasks:
            raise UserError("--measure objective: needs token stores; prepare the corpus, or leave out --measure")
        for option, value in (("--length", length), ("--stride", stride)):
            if value is not None:
                raise UserError(f"{option}: the objective uses the run's row length; this option is for perplexity")
        with while_kept(checkpoint_folder):
            return _evaluate_objective(
                checkpoint_folder, stores, limit=limit, batch_tokens=batch_tokens, precision=precision,
                device=torch_device,
            )  # fmt: skip
    if not stores and not corpora:
        if not tasks:
            raise UserError("nothing to evaluate on: name --data STORE, --corpus FILE or --tasks NAME")
        for option, value in (("--length", length), ("--stride", stride)):
            if value is not None:
                raise UserError(
                    f"{option}: is not for tasks of lm-eval, which cut their texts themselves; leave it out"
                )
    from terakoya_quality.evaluation import harness, models

    if tasks:
        harness.check_installed(tasks)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    results: Mapping[str, Mapping[str, float]] = {}
    settings: Mapping[str, Any] = {}
    if stores or corpora:
        if checkpoint_folder is not None:
            manifest = read_manifest(checkpoint_folder)
            model = models.load_checkpoint(checkpoint_folder, manifest, device=torch_device, dtype=dtype)
        else:
            model = models.load_folder(source, device=torch_device, dtype=dtype, trust_remote_code=trust_remote_code)
        fitting: Measure = "perplexity" if model.kind == "causal" else "pseudo-perplexity"
        if measure not in ("auto", fitting):
            raise UserError(f"--measure {measure}: {type(model.model).__name__} has no such measure, only {fitting}")
        measure = fitting
        data = _data_sets(model, stores, corpora)
        if model.kind == "causal":
            results, settings = _evaluate_perplexity(
                model, data, limit=limit, length=length, stride=stride, start_token=start_token,
                batch_tokens=batch_tokens, device=torch_device,
            )  # fmt: skip
        else:
            if stride is not None:
                raise UserError("--stride: is for causal models; for masked models, lines are cut at --length")
            results, settings = _evaluate_pseudo_perplexity(
                model, data, limit=limit, length=length, batch_tokens=batch_tokens, device=torch_device
            )
        settings = {**settings, "precision": precision or "fp32"}
    task_results: Mapping[str, Mapping[str, float]] = {}
    if tasks:
        folder, tokenizer = source, source
        if checkpoint_folder is not None:
            folder, tokenizer = checkpoint_folder / "model", checkpoint_folder / "tokenizer"
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder}: no Transformers folder for lm-eval; write one with `terakoya export`")
        task_results = harness.evaluate(
            folder, tokenizer if (tokenizer / "tokenizer_config.json").is_file() else folder, tasks,
            limit=limit, device=str(torch_device), dtype="bfloat16" if precision == "bf16" else "float32",
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        settings = settings or {"limit": limit, "precision": precision or "fp32"}
    return Evaluation(checkpoint_folder or source, measure if results else "", settings, results, task_results)


def _option(setting: str) -> str:
    """Returns the command line's option for a setting of the fine-tuning."""
    return f"--{setting.replace('learning_rates', 'learning_rate').replace('_', '-')}"


def _evaluate_objective(
    folder: Path,
    stores: Sequence[Path],
    *,
    limit: int | None,
    batch_tokens: int,
    precision: Precision | None,
    device: torch.device,
) -> Evaluation:
    from terakoya.store.remote_store import open_store
    from terakoya_quality.evaluation.objective import RunObjective

    manifest = read_manifest(folder)
    objective = RunObjective(folder, manifest, device=device, precision=precision)
    chosen = {str(path): open_store(path) for path in stores} or objective.validation_stores()
    if not chosen:
        raise UserError(f"{folder}: its run has no validation store; name a store: --data STORE")
    results = {name: objective.evaluate(store, rows=limit, batch_tokens=batch_tokens) for name, store in chosen.items()}
    parameters = manifest["parameters"]
    settings = {
        "objective": parameters["objective"]["type"],
        "length": parameters["data"]["sequence_length"],
        "limit": limit,
        "step": manifest["step"],
        "precision": objective.precision,
    }
    return Evaluation(folder, "objective", settings, results)


def _data_sets(model: EvaluatedModel, stores: Sequence[Path], corpora: Mapping[str, Corpus]) -> list[DataSet]:
    """Opens the data sets, stores first, in the order in which they were named. Raises UserError for a corpus without
    a document, and for a store that does not fit the model."""
    from terakoya.components.tokenizer import encode_texts, load_tokenizer
    from terakoya.store.tokenizer_identity import describe_different_ids
    from terakoya.tokenization.train import check_has_documents
    from terakoya_quality.evaluation.data import CorpusTexts, StoreTexts, open_store

    def encode(text: str) -> list[int]:
        encoded = encode_texts(lambda texts: model.tokenizer(texts[0], add_special_tokens=False, verbose=False), [text])
        ids: list[int] = encoded["input_ids"]
        return ids

    for corpus in corpora.values():
        check_has_documents(corpus)
    size = model.model.get_input_embeddings().num_embeddings
    data_sets: list[DataSet] = []
    for folder in stores:
        store = open_store(folder, vocabulary_size=size)
        theirs = load_tokenizer(store.tokenizer_folder).get_vocab()
        if different := describe_different_ids(model.tokenizer.get_vocab(), theirs, model.folder, folder):
            raise UserError(
                f"{folder}: was prepared with another tokenizer than the model's ({different}); prepare it with that"
            )
        data_sets.append(StoreTexts(str(folder), store))
    return data_sets + [CorpusTexts(name, corpus, encode) for name, corpus in corpora.items()]


def _evaluate_perplexity(
    model: EvaluatedModel,
    data: Sequence[DataSet],
    *,
    limit: int | None,
    length: int | None,
    stride: int | None,
    start_token: bool,
    batch_tokens: int,
    device: torch.device,
) -> tuple[Mapping[str, Mapping[str, float]], Mapping[str, Any]]:
    from terakoya_quality.evaluation import causal

    window = model.window(length)
    step = max(1, window // 2) if stride is None else stride
    if not 0 < step < window:
        raise UserError(f"--stride {step}: expected 1 to {window - 1}: windows of {window} must overlap by a token")
    start = model.special_token_id("bos", "eos") if start_token else None
    results = {
        data_set.name: causal.evaluate(
            model.model, data_set.texts("document", limit), start=start, pad=model.special_token_id("pad") or 0,
            length=window, stride=step, batch_tokens=batch_tokens, device=device,
        )
        for data_set in data
    }  # fmt: skip
    token = None if start is None else model.tokenizer.convert_ids_to_tokens(start)
    return results, {"length": window, "stride": step, "start_token": token, "limit": limit}


def _evaluate_pseudo_perplexity(
    model: EvaluatedModel,
    data: Sequence[DataSet],
    *,
    limit: int | None,
    length: int | None,
    batch_tokens: int,
    device: torch.device,
) -> tuple[Mapping[str, Mapping[str, float]], Mapping[str, Any]]:
    from terakoya_quality.evaluation import masked

    ids = {
        "before": model.special_token_id("cls", "bos"),
        "after": model.special_token_id("sep", "eos"),
        "mask": model.special_token_id("mask"),
    }
    missing = [name for name, number in ids.items() if number is None]
    if missing:
        raise UserError(
            f"{model.folder}: its tokenizer has no token for {', '.join(missing)}: expected [CLS] or BOS before a "
            "line, [SEP] or EOS after it, and [MASK]"
        )
    window = model.window(length)
    if window < 3:
        raise UserError(f"--length {window}: expected at least 3, a token between two special ones")
    limit = LINES if limit is None else limit
    results = {
        data_set.name: masked.evaluate(
            model.model, data_set.texts("line", limit), pad=model.special_token_id("pad") or 0, length=window,
            batch_tokens=batch_tokens, device=device, **{name: int(number or 0) for name, number in ids.items()},
        )
        for data_set in data
    }  # fmt: skip
    return results, {"length": window, "limit": limit}
