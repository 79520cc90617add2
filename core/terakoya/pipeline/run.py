"""One JSON from raw text to a published model: tokenizer -> prepare -> train -> export, resumable.

A stage whose output is there, made from the same settings and inputs, is skipped; one that was interrupted goes on or
starts again; one whose settings have changed since is an error that names the change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export, find_checkpoint
from terakoya.corpus.joined_corpora import join_corpora
from terakoya.errors import Stopped, UserError
from terakoya.json_settings import read_json
from terakoya.pipeline.corpora import Part, PipelineCorpus
from terakoya.pipeline.settings import Pipeline, read_pipeline
from terakoya.pipeline.stages import Stage, StageResult, content_digest, run_stages
from terakoya.store.token_store import PARTS, TokenStore
from terakoya.tokenization.train import make_tokenizer, train_tokenizer

__all__ = ["Pipeline", "read_pipeline", "run_pipeline"]


def run_pipeline(pipeline: Pipeline, *, redo: bool = False) -> Iterator[StageResult]:
    """Runs the stages that are not done yet; yields each as it is done or found done.

    With `redo`, outputs made from other settings are moved aside and made again. Raises UserError where a stage does,
    and Stopped when training was stopped before its end (the same call goes on with it).
    """
    plan = _Plan(pipeline)
    plan.check()
    return run_stages(plan.stages(), redo=redo)


class _Plan:
    """The stages of one pipeline; reads inputs only when a stage is reached."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.corpora = [PipelineCorpus(settings, pipeline) for settings in pipeline.sources]

    def check(self) -> None:
        """Finds wrong settings of any stage before the first one starts."""
        pipeline = self.pipeline
        if pipeline.tokenizer is not None:
            make_tokenizer(pipeline.tokenizer, source="pipeline: tokenizer")
        for corpus in self.corpora:
            corpus.check()
        for folder in (pipeline.store, pipeline.validation_store):
            if (
                pipeline.corpora
                and folder is not None
                and any((folder / each).exists() for each in ("store.json", PARTS))
            ):
                raise UserError(
                    f"{folder}: expected a folder that holds a store for each of corpora, got one that is a store "
                    "itself; give another"
                )
        self._parameters()

    def stages(self) -> Sequence[Stage]:
        """Tokenizer (unless one is given), stores, run, export."""
        pipeline = self.pipeline
        stages = []
        if pipeline.tokenizer is not None:
            stages.append(
                Stage("tokenizer", "tokenizer_folder", pipeline.tokenizer_folder, self._tokenizer_from, self._tokenizer)
            )
        elif not pipeline.tokenizer_folder.is_dir():
            raise UserError(
                f'tokenizer_folder: there is no {pipeline.tokenizer_folder}; give "tokenizer" to train one, as in '
                '{"type": "mecab_wordpiece"}'
            )
        for corpus in self.corpora:
            for part, out in corpus.stores().items():
                words = ["prepare", *(["validation"] if part == "validation" else []), corpus.settings.name]
                key = "store" if part == "train" else "validation_store"
                made_from, make = partial(self._store_from, corpus, part), partial(corpus.prepare, part)
                stages.append(
                    Stage(
                        " ".join(filter(None, words)), key, out, made_from, make, resumes=True, up_to_date=self._since
                    )
                )
        stages.append(
            Stage("train", "run", pipeline.run, self._run_from, self._train, resumes=True, up_to_date=_with_defaults)
        )
        stages.append(
            Stage("export", "export", pipeline.export, self._export_from, self._export,
                  up_to_date=lambda made_from: {"manifest": self._export_from()["manifest"], **made_from})
        )  # fmt: skip
        return stages

    def _tokenizer_from(self) -> Mapping[str, Any]:
        settings = self.pipeline.tokenizer
        if not self.pipeline.corpora:
            return {"tokenizer": settings, **self.corpora[0].facts()}
        facts = {corpus.settings.name: corpus.facts() for corpus in self.corpora}
        return {"tokenizer": settings, "corpora": facts, "order": list(facts)}

    def _tokenizer(self) -> Mapping[str, Any]:
        pipeline = self.pipeline
        assert pipeline.tokenizer is not None
        corpus = join_corpora([each.to_learn_from() for each in self.corpora])
        return train_tokenizer(
            corpus, pipeline.tokenizer_folder, settings=pipeline.tokenizer, processes=pipeline.workers
        )

    @cached_property
    def _ids_from(self) -> Mapping[str, str]:
        """What ids depend on, hashed: the tokenizer's files, its dictionary, library versions."""
        from terakoya.tokenization.recognise import recognise_tokenizer

        folder = self.pipeline.tokenizer_folder
        return recognise_tokenizer(folder).fingerprint(folder)

    def _store_from(self, corpus: PipelineCorpus, part: Part) -> Mapping[str, Any]:
        return {**corpus.store_from(part), "ids": self._ids_from}

    def _since(self, made_from: Mapping[str, Any]) -> Mapping[str, Any]:
        """A store's record, which did not always hold `ids`."""
        return {"ids": self._ids_from, **made_from}

    def _parameters(self) -> Mapping[str, Any]:
        """The parameters, complete, with the pipeline's stores as their data."""
        given = self.pipeline.parameters
        raw, source = (read_json(given), given.name) if isinstance(given, Path) else (given, "parameters")
        stores: dict[str, Any] = {"train": [], "validation": []}
        for corpus in self.corpora:
            stores["train"].append({"store": str(corpus.settings.store), "weight": corpus.settings.weight})
            if corpus.settings.validation_store is not None:
                stores["validation"].append(str(corpus.settings.validation_store))
        data = raw.get("data", {})
        if isinstance(data, Mapping):
            raw = {**raw, "data": {**data, **stores}}
        return Parameters.from_dict(raw, source=source).dump()

    def _run_from(self) -> Mapping[str, Any]:
        stores = [out for corpus in self.corpora for out in corpus.stores().values()]
        return {"parameters": self._parameters(), "stores": [TokenStore.open(store).fingerprint for store in stores]}

    def _train(self) -> Mapping[str, Any]:
        import torch

        from terakoya.estimation import out_of_memory
        from terakoya.launch.local import run_processes
        from terakoya.training.setup import train_in_this_process

        pipeline, parameters = self.pipeline, self._parameters()
        processes = pipeline.training_processes or max(1, torch.cuda.device_count())
        if processes == 1:
            result = train_in_this_process(
                Parameters.from_dict(parameters, source="parameters"),
                pipeline.run,
                advice=out_of_memory.explain_allocation_errors,
            )
            if result.stopped_by:
                raise Stopped(f"train: stopped at step {result.step} by {result.stopped_by}; the same command goes on")
            return {"step": result.step}
        file = pipeline.run.with_name(f".{pipeline.run.name}.parameters.json")
        file.write_text(json.dumps(parameters, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        code = run_processes(["train", str(file), "--out", str(pipeline.run)], processes)
        if code == Stopped.exit_code:
            raise Stopped("train: stopped, and saved; the same command goes on")
        if code:
            raise UserError(
                f"train: ended early with exit code {code}; the lines above say why, the same command goes on"
            )
        return {}

    def _export_from(self) -> Mapping[str, Any]:
        checkpoint = find_checkpoint(self.pipeline.run)
        manifest = hashlib.sha256((checkpoint / "manifest.json").read_bytes()).hexdigest()  # it has the files' hashes
        return {"checkpoint": content_digest(checkpoint / "state"), "manifest": manifest}

    def _export(self) -> Mapping[str, Any]:
        done = export(self.pipeline.run, self.pipeline.export)
        return {"step": done.step, "models": dict(done.models)}


def _with_defaults(made_from: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a run was made from, with today's defaults for settings that there were not then."""
    try:
        return {**made_from, "parameters": Parameters.from_dict(made_from["parameters"], source="record").dump()}
    except UserError:  # a setting of then that there is no more: a change that is worth naming
        return made_from
