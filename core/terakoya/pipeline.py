"""One JSON from raw text to a published model: tokenizer -> prepare -> train -> export, resumable.

A stage whose output is there, made from the same settings and inputs, is skipped; one that was interrupted goes on or
starts again; one whose settings have changed since is an error that names the change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from terakoya.data.cleaning import cleaned, read_steps
from terakoya.data.cleaning_plan import make_plan
from terakoya.data.corpus import Corpus
from terakoya.data.corpus_files import find_files
from terakoya.data.hold_out import hold_out
from terakoya.data.store import TokenStore
from terakoya.errors import UserError
from terakoya.export_model import export, find_checkpoint
from terakoya.parameter_files import explain, read_json
from terakoya.parameters import Parameters
from terakoya.stages import Stage, StageResult, content_digest, run_stages
from terakoya.tokenizer import make_tokenizer, train_tokenizer


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Pipeline(BaseModel):
    """The keys of a pipeline JSON. Paths are relative to the working directory, as on the command line.

    Attributes:
        corpus: files, folders, patterns such as `text/*.jsonl.gz`, or addresses such as `s3://bucket/wiki`.
        validation_corpus: the same for validation; or
        hold_out: how many documents to take from the end of the corpus for it instead; or
        clean: cleaning steps, of which `hold_out` chooses documents by a hash of their text.
        field: the key or column that holds the text.
        documents: what ends a document in txt files, a blank line or every line.
        tokenizer: its `type` and settings; left out, `tokenizer_folder` is used as it is.
        unit: what a stored sequence is; the layouts `lines` and `pairs` need `line`.
        max_rejects: how many bad documents are allowed, a count or a share of all.
        parameters: a parameter file, or its content. Its `data.train` and `data.validation` are the pipeline's stores.
        processes: for the tokenizer and the stores; 0 is one for each core.
        training_processes: for training; null is one for each GPU, one without a GPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpus: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = Field(min_length=1)
    validation_corpus: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    hold_out: int = Field(default=0, ge=0)
    clean: tuple[dict[str, Any], ...] = ()
    field: str = "text"
    documents: Literal["blank", "line"] = "blank"
    tokenizer: dict[str, Any] | None = None
    tokenizer_folder: Path
    store: Path
    validation_store: Path | None = None
    unit: Literal["document", "line"] = "document"
    parameters: Path | dict[str, Any]
    run: Path
    export: Path
    max_rejects: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] = 0.01
    processes: int = Field(default=0, ge=0)
    training_processes: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.validation_corpus and self.hold_out:
            raise ValueError("give validation_corpus or hold_out, not both")
        if self.clean and self.hold_out:
            raise ValueError('give hold_out as the last step of clean: {"type": "hold_out", "share": 0.01}')
        if self.validation_corpus and self.splits:
            raise ValueError("give validation_corpus or the step hold_out, not both")
        if bool(self.validation_corpus or self.hold_out or self.splits) != bool(self.validation_store):
            raise ValueError("validation_store goes together with validation_corpus or hold_out")
        if self.tokenizer is not None and not isinstance(self.tokenizer.get("type"), str):
            raise ValueError('tokenizer.type: expected a name such as "mecab_wordpiece"')
        outputs = [self.tokenizer_folder, self.store, self.validation_store, self.run, self.export]
        folders = [path.absolute() for path in outputs if path is not None]
        for index, folder in enumerate(folders):
            for other in folders[:index]:
                if folder == other or folder in other.parents or other in folder.parents:
                    raise ValueError(f"{folder} and {other}: expected folders of their own, none inside another")
        return self

    @property
    def splits(self) -> bool:
        """Whether a cleaning step sets documents aside."""
        return any(step.get("type") == "hold_out" for step in self.clean)

    @cached_property
    def workers(self) -> int:
        """Processes for the tokenizer and the stores."""
        if self.processes:
            return self.processes
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_pipeline(file: Path) -> Pipeline:
    """The pipeline in `file`.

    Raises:
        UserError: every problem on a line of its own: file, key path, expected, got, nearest known key.
    """
    try:
        return Pipeline.model_validate(read_json(file))
    except ValidationError as error:
        raise UserError("\n".join(f"{file.name}: {problem}" for problem in explain(error, Pipeline))) from None


def run_pipeline(pipeline: Pipeline, *, redo: bool = False) -> Iterator[StageResult]:
    """Runs the stages that are not done yet; yields each as it is done or found done.

    With `redo`, outputs made from other settings are moved aside and made again. Raises UserError where a stage does,
    and when training was stopped before its end (the same call goes on with it).
    """
    plan = _Plan(pipeline)
    plan.check()
    return run_stages(plan.stages(), redo=redo)


class _Plan:
    """The stages of one pipeline; reads inputs only when a stage is reached."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def check(self) -> None:
        """Finds wrong settings of any stage before the first one starts."""
        if self.pipeline.tokenizer is not None:
            make_tokenizer(self.pipeline.tokenizer, source="pipeline: tokenizer")
        if self.pipeline.clean:
            read_steps(self.pipeline.clean, source="pipeline: clean")
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
        stages.append(
            Stage("prepare", "store", pipeline.store, lambda: self._store_from("train"),
                  lambda: self._prepare("train"), resumes=True)
        )  # fmt: skip
        if pipeline.validation_store is not None:
            stages.append(
                Stage("prepare validation", "validation_store", pipeline.validation_store,
                      lambda: self._store_from("validation"), lambda: self._prepare("validation"), resumes=True)
            )  # fmt: skip
        stages.append(Stage("train", "run", pipeline.run, self._run_from, self._train, resumes=True))
        stages.append(Stage("export", "export", pipeline.export, self._export_from, self._export))
        return stages

    # ------------------------------------------------------------------------------------------------- corpus

    def _corpus(self, part: str) -> Corpus:
        """The files for training or for validation, to be cleaned."""
        pipeline = self.pipeline
        held_out = part == "validation" and pipeline.splits
        patterns = pipeline.corpus if part == "train" or held_out else pipeline.validation_corpus
        corpus = Corpus(find_files(patterns), field=pipeline.field, documents=pipeline.documents)
        if not pipeline.clean:
            return corpus
        steps = read_steps(pipeline.clean, source="pipeline: clean")
        return cleaned(corpus, steps, self._clean_folder(part), held_out=held_out)

    def _clean_folder(self, part: str) -> Path:
        store = self.pipeline.store if part == "train" or self.pipeline.splits else self.pipeline.validation_store
        assert store is not None
        return store.with_name(f"{store.name}.clean")

    @cached_property
    def whole(self) -> Corpus:
        """The corpus as given, cleaned."""
        return self._corpus("train")

    @cached_property
    def parts(self) -> Mapping[str, Corpus]:
        """The documents for training and for validation."""
        pipeline = self.pipeline
        if pipeline.validation_corpus or pipeline.splits:
            return {"train": self.whole, "validation": self._corpus("validation")}
        if not pipeline.hold_out:
            return {"train": self.whole}
        folder = pipeline.store.with_name(pipeline.store.name + ".split")
        train, held_out = hold_out(self.whole, pipeline.hold_out, folder)
        options: Any = {"field": pipeline.field, "documents": pipeline.documents}
        return {"train": Corpus(train, **options), "validation": Corpus([held_out], **options)}

    # ------------------------------------------------------------------------------------------------- stages

    def _tokenizer_from(self) -> Mapping[str, Any]:
        pipeline = self.pipeline
        return {
            "tokenizer": pipeline.tokenizer,
            "corpus": self.whole.fingerprint,
            "field": pipeline.field,
            "documents": pipeline.documents,
            **({"clean": pipeline.clean} if pipeline.clean else {}),
        }

    def _tokenizer(self) -> Mapping[str, Any]:
        pipeline = self.pipeline
        assert pipeline.tokenizer is not None
        if pipeline.clean:
            make_plan(self.whole, processes=pipeline.workers)
        return train_tokenizer(
            self.whole, pipeline.tokenizer_folder, settings=pipeline.tokenizer, processes=pipeline.workers
        )

    def _store_from(self, part: str) -> Mapping[str, Any]:
        pipeline = self.pipeline
        corpus = self.whole if part == "train" or pipeline.hold_out else self.parts[part]
        return {
            "corpus": corpus.fingerprint,
            "tokenizer": content_digest(pipeline.tokenizer_folder),
            "field": pipeline.field,
            "documents": pipeline.documents,
            "unit": pipeline.unit,
            "hold_out": pipeline.hold_out,
            **({"clean": pipeline.clean} if pipeline.clean else {}),
        }

    def _prepare(self, part: str) -> Mapping[str, Any]:
        from terakoya.commands.prepare import prepare

        pipeline = self.pipeline
        out = pipeline.store if part == "train" else pipeline.validation_store
        assert out is not None
        facts = prepare(
            self.parts[part].sources,
            tokenizer=pipeline.tokenizer_folder,
            out=out,
            processes=pipeline.workers,
            documents=pipeline.documents,
            field=pipeline.field,
            unit=pipeline.unit,
            max_rejects=pipeline.max_rejects,
            clean=pipeline.clean or None,
            clean_folder=self._clean_folder(part),
            held_out=part == "validation" and pipeline.splits,
        )
        return {"documents": facts.documents, "tokens": facts.tokens, "rejected": facts.rejected}

    def _parameters(self) -> Mapping[str, Any]:
        """The parameters, complete, with the pipeline's stores as their data."""
        given = self.pipeline.parameters
        raw, source = (read_json(given), given.name) if isinstance(given, Path) else (given, "parameters")
        stores: dict[str, Any] = {"train": [{"store": str(self.pipeline.store)}], "validation": []}
        if self.pipeline.validation_store is not None:
            stores["validation"] = [str(self.pipeline.validation_store)]
        data = raw.get("data", {})
        if isinstance(data, Mapping):
            raw = {**raw, "data": {**data, **stores}}
        return Parameters.from_dict(raw, source=source).dump()

    def _run_from(self) -> Mapping[str, Any]:
        stores = [self.pipeline.store, self.pipeline.validation_store]
        return {
            "parameters": self._parameters(),
            "stores": [TokenStore.open(store).fingerprint for store in stores if store is not None],
        }

    def _train(self) -> Mapping[str, Any]:
        import torch

        from terakoya.training.local import run_processes
        from terakoya.training.setup import train_here

        pipeline, parameters = self.pipeline, self._parameters()
        processes = pipeline.training_processes or max(1, torch.cuda.device_count())
        if processes == 1:
            result = train_here(Parameters.from_dict(parameters, source="parameters"), pipeline.run)
            if result.stopped_by:
                raise UserError(
                    f"train: stopped at step {result.step} by {result.stopped_by}; the same command goes on"
                )
            return {"step": result.step}
        file = pipeline.run.with_name(f".{pipeline.run.name}.parameters.json")
        file.write_text(json.dumps(parameters, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        code = run_processes(["train", str(file), "--out", str(pipeline.run)], processes)
        if code:
            raise UserError(
                f"train: ended early with exit code {code}; the lines above say why, the same command goes on"
            )
        return {}

    def _export_from(self) -> Mapping[str, Any]:
        return {"checkpoint": content_digest(find_checkpoint(self.pipeline.run) / "state")}

    def _export(self) -> Mapping[str, Any]:
        done = export(self.pipeline.run, self.pipeline.export)
        return {"step": done.step, "models": dict(done.models)}
