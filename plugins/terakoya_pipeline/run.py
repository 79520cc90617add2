"""Runs a pipeline JSON from raw text to a published model: tokenizer -> prepare -> train -> export.

A stage whose output was already made from the same settings and inputs is skipped; an interrupted stage continues or
starts again; a stage whose settings have changed since raises an error that names the change.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from terakoya.atomic_files import write_text
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.config.presets import find_parameters
from terakoya.conversion.elsewhere import elsewhere
from terakoya.conversion.export import export
from terakoya.errors import LASTING_EXIT_CODES, Stopped, TemporaryFailure, UserError
from terakoya.json_settings import read_settings, without_notes
from terakoya.preparation.word_borders import find_word_finder
from terakoya.runs.checkpoints import list_checkpoints
from terakoya.runs.finding import find_checkpoint
from terakoya.store.token_store import PARTS, TokenStore
from terakoya.tokenization.recognise import recognise_tokenizer
from terakoya.tokenization.train import make_tokenizer, train_tokenizer
from terakoya_pipeline.corpora import Part, PipelineCorpus
from terakoya_pipeline.joined_corpora import join_corpora
from terakoya_pipeline.settings import Pipeline, read_pipeline
from terakoya_pipeline.stages import Stage, StageResult, content_digest, run_stages

__all__ = ["Pipeline", "read_pipeline", "run_pipeline"]

logger = logging.getLogger("terakoya")

FINAL_EXIT_CODES = (0, *LASTING_EXIT_CODES, Stopped.exit_code, 130, 143)
"""After which training does not start again: docs/exit-codes.md."""


def run_pipeline(pipeline: Pipeline, *, redo: bool = False, trains: bool = True) -> Iterator[StageResult]:
    """Runs the stages that are not done yet; yields the result of each stage, skipped or made.

    With `redo`, outputs made from other settings are moved aside and made again. Without `trains` the stores are the
    last stage, and `parameters_file` has the run's parameters, for `terakoya train` and `launch`.

    Raises:
        UserError: a stage failed, or its output does not match its settings.
        Stopped: training was stopped before its end; the same call resumes it.
    """
    plan = _Plan(pipeline)
    plan.check(trains=trains)
    stages = plan.stages()
    if not trains:
        plan.write_parameters()
        stages = stages[:-2]
    return run_stages(stages, redo=redo)


def parameters_file(pipeline: Pipeline) -> Path:
    """Returns the file for the run's parameters, with the pipeline's stores as their data."""
    return pipeline.run.with_name(f"{pipeline.run.name}.parameters.json")


class _Plan:
    """The stages of one pipeline; inputs are read only when their stage is reached."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.corpora = [PipelineCorpus(settings, pipeline) for settings in pipeline.sources]

    def check(self, *, trains: bool = True) -> None:
        """Raises UserError for wrong settings of any stage, before the first stage starts; without `trains` nothing of
        the processes that train is checked, which may be on other machines."""
        pipeline = self.pipeline
        if pipeline.tokenizer is not None:
            make_tokenizer(pipeline.tokenizer, source="pipeline: tokenizer")
        elif not pipeline.tokenizer_folder.is_dir():
            raise UserError(
                f'tokenizer_folder: {pipeline.tokenizer_folder}: no such folder; give "tokenizer" to train one, as in '
                '{"type": "mecab_wordpiece"}'
            )
        for corpus in self.corpora:
            corpus.check()
        for folder in (pipeline.store, pipeline.validation_store):
            if (
                pipeline.corpora
                and folder is not None
                and any((folder / name).exists() for name in ("store.json", PARTS))
            ):
                raise UserError(
                    f"{folder}: expected a folder that holds a store for each of corpora, got a store itself; "
                    "give another folder"
                )
        parameters = Parameters.from_dict(self._parameters(), source="parameters")
        if trains:
            self._check_processes(parameters)
        self._check_training(parameters)

    def _check_training(self, parameters: Parameters) -> None:
        """Raises UserError where the last stages would refuse `parameters`: the model its sizes, the objective the
        stores."""
        from terakoya.checking.model_check import check_model, check_start

        pipeline, layout = self.pipeline, parameters.objective.row_layout().kind
        if layout in ("lines", "pairs") and pipeline.unit != "line":
            raise UserError(
                f'unit: expected "line" for rows of the layout "{layout}", got "{pipeline.unit}"; set "unit": "line", '
                "or another layout of the objective in the parameters"
            )
        vocabulary = self._vocabulary(parameters.data.sequence_length)
        check_model(parameters, vocabulary)
        check_start(parameters, vocabulary)

    def _check_processes(self, parameters: Parameters) -> None:
        """Raises UserError where this machine has too few GPUs, its processes do not fit the batch table, or its CPU is
        slow in the precision, which another machine may have been given."""
        import torch

        from terakoya.distributed.topology import ProcessInfo, Topology, host_name, rank_batches
        from terakoya.toolkit.fast_products import precision_problems

        count, gpus = self._training_processes, torch.cuda.device_count()
        if not gpus and (slow := [*precision_problems(parameters.precision, torch.device("cpu"))]):
            raise UserError(f"parameters.precision: {slow[0]}")
        if 0 < gpus < count:
            raise UserError(
                f"training_processes: expected at most {gpus}, the GPUs of this machine, got {count}; to train on "
                "several machines, make the stores with --no-train and start the run with terakoya launch"
            )
        processes = tuple(ProcessInfo(rank, 0, rank, host_name()) for rank in range(count))
        rank_batches(
            parameters.batch_size, parameters.micro_batch_size, Topology(processes, parameters.parallel.replica_size),
            redistribute=parameters.on_lost_node == "redistribute",
        )  # fmt: skip

    def write_parameters(self) -> Path:
        """Writes the parameters of the run; returns the file."""
        file = parameters_file(self.pipeline)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(self._given_parameters()[0], ensure_ascii=False, indent=2) + "\n")
        return file

    @property
    def _training_processes(self) -> int:
        import torch

        return self.pipeline.training_processes or max(1, torch.cuda.device_count())

    def _vocabulary(self, sequence_length: int) -> Vocabulary:
        """Returns the vocabulary of the stores, as far as it is known before they are made."""
        from terakoya.checking.synthetic_rows import synthetic_vocabulary

        pipeline, folder = self.pipeline, self.pipeline.tokenizer_folder
        if pipeline.tokenizer is None:
            return recognise_tokenizer(folder).encoder(folder).vocabulary
        tokenizer = make_tokenizer(pipeline.tokenizer, source="pipeline: tokenizer")
        return tokenizer.planned_vocabulary() or synthetic_vocabulary(32768, sequence_length)

    def stages(self) -> Sequence[Stage]:
        """Returns the stages: tokenizer (unless one is given), stores, run, export."""
        pipeline = self.pipeline
        stages = []
        if pipeline.tokenizer is not None:
            folder, inputs = pipeline.tokenizer_folder, self._tokenizer_inputs
            stages.append(Stage("tokenizer", "tokenizer_folder", folder, inputs, self._train_tokenizer))
        for corpus in self.corpora:
            for part, out in corpus.store_folders().items():
                words = ["prepare", *(["validation"] if part == "validation" else []), corpus.settings.name]
                key = "store" if part == "train" else "validation_store"
                inputs_of, make = partial(self._store_inputs, corpus, part), partial(corpus.prepare, part)
                stages.append(Stage(" ".join(filter(None, words)), key, out, inputs_of, make, resumes=True))
        train = Stage(
            "train", "run", pipeline.run, self._run_inputs, self._train,
            resumes=True, upgrade=_upgrade_run_inputs, check=self._check_run,
        )  # fmt: skip
        return [*stages, train, Stage("export", "export", pipeline.export, self._export_inputs, self._export)]

    def _tokenizer_inputs(self) -> Mapping[str, Any]:
        settings = self.pipeline.tokenizer
        if not self.pipeline.corpora:
            return {"tokenizer": settings, **self.corpora[0].tokenizer_inputs()}
        inputs = {corpus.settings.name: corpus.tokenizer_inputs() for corpus in self.corpora}
        return {"tokenizer": settings, "corpora": inputs, "order": list(inputs)}

    def _train_tokenizer(self) -> Mapping[str, Any]:
        pipeline = self.pipeline
        assert pipeline.tokenizer is not None
        corpus = join_corpora([corpus.tokenizer_corpus() for corpus in self.corpora])
        return train_tokenizer(
            corpus, pipeline.tokenizer_folder, settings=pipeline.tokenizer, processes=pipeline.workers
        )

    @cached_property
    def _tokenizer_fingerprint(self) -> Mapping[str, str]:
        """Hashes of everything that token ids depend on: the tokenizer's files, its dictionary, library versions."""
        folder = self.pipeline.tokenizer_folder
        return recognise_tokenizer(folder).fingerprint(folder)

    @cached_property
    def _words_fingerprint(self) -> Mapping[str, str]:
        """The hash of everything that the words of `words` depend on; nothing without that key."""
        words = self.pipeline.words
        return {} if words is None else {"words_fingerprint": find_word_finder(words).fingerprint}

    def _store_inputs(self, corpus: PipelineCorpus, part: Part) -> Mapping[str, Any]:
        return {**corpus.store_inputs(part), "ids": self._tokenizer_fingerprint, **self._words_fingerprint}

    def _parameters(self) -> Mapping[str, Any]:
        """Returns the complete parameters, with the pipeline's stores as their data."""
        raw, source = self._given_parameters()
        return Parameters.from_dict(raw, source=source, assumed_nodes=1).dump()

    def _given_parameters(self) -> tuple[Mapping[str, Any], str]:
        """Returns the parameters as they are written, with the pipeline's stores as their data, and the file's name."""
        given = self.pipeline.parameters
        raw: Mapping[str, Any]
        if isinstance(given, Path):
            file = find_parameters(given)
            raw, source = read_settings(file), file.name
        else:
            raw, source = without_notes(given), "parameters"
        stores: dict[str, Any] = {"train": [], "validation": []}
        for corpus in self.corpora:
            stores["train"].append({"store": str(corpus.settings.store), "weight": corpus.settings.weight})
            if corpus.settings.validation_store is not None:
                stores["validation"].append(str(corpus.settings.validation_store))
        data = raw.get("data", {})
        if isinstance(data, Mapping):
            raw = {**raw, "data": {**data, **stores}}
        return raw, source

    def _run_inputs(self) -> Mapping[str, Any]:
        stores = [out for corpus in self.corpora for out in corpus.store_folders().values()]
        return {"parameters": self._parameters(), "stores": [TokenStore.open(store).fingerprint for store in stores]}

    def _check_run(self) -> None:
        from terakoya.training.resuming.before_torch import check_start
        from terakoya.training.resuming.changes import ChangeError

        run = self.pipeline.run
        try:
            check_start(run, Parameters.from_dict(self._parameters(), source="parameters"), frozenset())
        except ChangeError as error:
            changed = ", ".join(error.args[1])
            raise UserError(
                f'{run}: the run was started with other values of {changed}; give other folders as "run" and "export", '
                "or use --redo, which moves these aside"
            ) from error

    def _train(self) -> Mapping[str, Any]:
        import torch

        from terakoya.checking.model_errors import explain_model_errors
        from terakoya.training.setup import StartOptions, train_in_this_process

        pipeline, processes = self.pipeline, self._training_processes
        if processes == 1 and not torch.cuda.is_available():  # a GPU's process may crash and start again
            parameters = Parameters.from_dict(self._parameters(), source="parameters")
            result = train_in_this_process(parameters, pipeline.run, StartOptions(advice=explain_model_errors))
            if result.stopped_by:
                raise Stopped(f"train: stopped at step {result.step} by {result.stopped_by}; the same command resumes")
            return {"step": result.step}
        code = self._train_in(processes)
        if code == Stopped.exit_code:
            raise Stopped("train: stopped on request, checkpoint saved; the same command resumes")
        if code == TemporaryFailure.exit_code:
            raise TemporaryFailure("train: a file cannot be read now, see above; the same command tries again")
        if code:
            failure = f"train: failed with exit code {code}; the lines above say why, and the same command resumes"
            error = UserError(failure)
            error.exit_code = code
            raise error
        step, _ = list_checkpoints(pipeline.run / "checkpoints")[-1]
        return {"step": step}

    def _train_in(self, processes: int) -> int:
        """Trains in so many processes, after a crash again if a checkpoint was made before; returns the exit code."""
        from terakoya.launch.local import run_processes

        words, checkpoints = ["train", str(self.write_parameters())], self.pipeline.run / "checkpoints"
        newest = list_checkpoints(checkpoints)[-1:]
        while True:
            code = run_processes([*words, "--out", str(self.pipeline.run)], processes)
            before, newest = newest, list_checkpoints(checkpoints)[-1:]
            if code in FINAL_EXIT_CODES or newest == before:
                return code
            logger.warning("train: ended with exit code %d; starts again from step %d", code, newest[0][0])

    def _export_inputs(self) -> Mapping[str, Any]:
        checkpoint = find_checkpoint(self.pipeline.run)
        manifest = hashlib.sha256((checkpoint / "manifest.json").read_bytes()).hexdigest()  # has the files' hashes
        return {"checkpoint": content_digest(checkpoint / "state"), "manifest": manifest}

    def _export(self) -> Mapping[str, Any]:
        with elsewhere() as process:
            result = export(self.pipeline.run, self.pipeline.export)
            process.check(result.classes, trusted=result.trusted)
        return {"step": result.step, "models": dict(result.models)}


def _upgrade_run_inputs(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds today's defaults of the settings that did not exist when `inputs` was recorded."""
    try:
        return {**inputs, "parameters": Parameters.from_dict(inputs["parameters"], source="record").dump()}
    except UserError:  # a recorded setting no longer exists: a change that the error should name
        return inputs
