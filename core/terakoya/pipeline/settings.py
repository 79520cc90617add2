"""The keys of a pipeline JSON, for one corpus or for several with names and weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from terakoya.errors import UserError
from terakoya.json_settings import explain, read_json
from terakoya.process_pool import cores
from terakoya.rows.blending import PERIOD, integer_weights


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Files = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
Count = Annotated[int, Field(ge=0)]
MaxRejects = Count | Annotated[float, Field(ge=0, le=1)]
Documents = Literal["blank", "line"]

_NAME = re.compile(r"\w[\w-]*")


class CorpusEntry(BaseModel):
    """One of the `corpora`. A key that is left out is as on top of the pipeline.

    Attributes:
        corpus: as the pipeline's.
        weight: its share of the *rows* of training, in any unit: 70, 20 and 10 are 70 %, 20 % and 10 % of all rows,
            whatever the corpora's sizes, exactly so after any number of rows (less than one row off). Each store has
            epochs of its own: a small one with a large weight is read again sooner.
        validation_corpus, hold_out, clean, field, documents, max_rejects: as the pipeline's. An entry that itself says
            what it is validated on, in any of the three ways, takes no `hold_out` from above.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpus: Files = Field(min_length=1)
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    validation_corpus: Files = ()
    hold_out: Count | None = None
    clean: tuple[dict[str, Any], ...] | None = None
    field: str | None = None
    documents: Documents | None = None
    max_rejects: MaxRejects | None = None


@dataclass(frozen=True)
class CorpusSettings:
    """One corpus of a pipeline, every setting decided.

    Attributes:
        name: "" where the pipeline has one corpus only, without a name.
        store, validation_store: the folders of its own stores; the second is None where nothing is held out.
        The others: see `Pipeline` and `CorpusEntry`.
    """

    name: str
    corpus: Sequence[str]
    weight: float
    validation_corpus: Sequence[str]
    hold_out: int
    clean: tuple[dict[str, Any], ...]
    field: str
    documents: Documents
    max_rejects: int | float
    store: Path
    validation_store: Path | None

    @property
    def key(self) -> str:
        """Where its settings stand in the pipeline: `corpora.wiki.`, or nothing."""
        return f"corpora.{self.name}." if self.name else ""

    @property
    def splits(self) -> bool:
        """Whether a cleaning step sets documents aside."""
        return _splits(self.clean)

    @property
    def validates(self) -> bool:
        """Whether it has documents for validation."""
        return bool(self.validation_corpus or self.hold_out or self.splits)


def _splits(clean: Sequence[Mapping[str, Any]]) -> bool:
    return any(step.get("type") == "hold_out" for step in clean)


class Pipeline(BaseModel):
    """The keys of a pipeline JSON. Paths are relative to the working directory, as on the command line.

    Attributes:
        corpus: files, folders, patterns such as `text/*.jsonl.gz`, or addresses such as `s3://bucket/wiki`; or
        corpora: several of them by name, each with a weight and settings of its own (`CorpusEntry`). The tokenizer
            learns from all, in the order of the file, and from nothing that is held out; each has a store of its own
            in the folder `store` and, if it is validated, one in `validation_store`, both under its name.
        validation_corpus: the same as `corpus` for validation; or
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

    corpus: Files = Field(default=(), min_length=1)
    corpora: dict[str, CorpusEntry] = Field(default_factory=dict)
    validation_corpus: Files = ()
    hold_out: Count = 0
    clean: tuple[dict[str, Any], ...] = ()
    field: str = "text"
    documents: Documents = "blank"
    tokenizer: dict[str, Any] | None = None
    tokenizer_folder: Path
    store: Path
    validation_store: Path | None = None
    unit: Literal["document", "line"] = "document"
    parameters: Path | dict[str, Any]
    run: Path
    export: Path
    max_rejects: MaxRejects = 0.01
    processes: int = Field(default=0, ge=0)
    training_processes: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.corpus) == bool(self.corpora):
            raise ValueError("corpus: expected either it or corpora, got " + ("both" if self.corpus else "neither"))
        if self.corpora:
            self._check_corpora()
        for each in self.sources:
            if each.validation_corpus and each.hold_out:
                raise ValueError(f"{each.key}hold_out: give validation_corpus or hold_out, not both")
            if each.clean and each.hold_out:
                raise ValueError(
                    f'{each.key}clean: give hold_out as the last step of clean: {{"type": "hold_out", "share": 0.01}}'
                )
            if each.validation_corpus and each.splits:
                raise ValueError(f"{each.key}clean: give validation_corpus or the step hold_out, not both")
        if any(each.validates for each in self.sources) != bool(self.validation_store):
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

    def _check_corpora(self) -> None:
        if self.validation_corpus:
            raise ValueError(
                "validation_corpus: give it inside each of corpora, so that each is validated on text of its own"
            )
        for name in self.corpora:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f'corpora: "{name}": expected a plain name of letters, digits, _ and -: it becomes a folder'
                )
        if len({name.casefold() for name in self.corpora}) < len(self.corpora):
            raise ValueError("corpora: expected names that differ in more than capitals: each becomes a folder")
        try:
            integer_weights([each.weight for each in self.corpora.values()])
        except UserError:
            least = min(self.corpora, key=lambda name: self.corpora[name].weight)
            raise ValueError(
                f"corpora.{least}.weight: {self.corpora[least].weight:g} is less than one row in {PERIOD:,} of this "
                "blend; raise it or leave the corpus out"
            ) from None

    @cached_property
    def sources(self) -> tuple[CorpusSettings, ...]:
        """Every corpus, in the order of the file."""
        if not self.corpora:
            only = CorpusEntry.model_construct(corpus=self.corpus, validation_corpus=self.validation_corpus)
            return (self._decided("", only, self.store, self.validation_store),)
        found = []
        for name, entry in self.corpora.items():
            validation = self.validation_store / name if self.validation_store is not None else None
            found.append(self._decided(name, entry, self.store / name, validation))
        return tuple(found)

    def _decided(self, name: str, entry: CorpusEntry, store: Path, validation_store: Path | None) -> CorpusSettings:
        """The settings of one corpus: its own, and this pipeline's where it has none."""
        own_way = bool(name) and (bool(entry.validation_corpus) or _splits(entry.clean or ()))
        hold_out = entry.hold_out if entry.hold_out is not None else 0 if own_way else self.hold_out
        clean = self.clean if entry.clean is None else entry.clean
        return CorpusSettings(
            name=name,
            corpus=entry.corpus,
            weight=entry.weight,
            validation_corpus=entry.validation_corpus,
            hold_out=hold_out,
            clean=clean,
            field=self.field if entry.field is None else entry.field,
            documents=self.documents if entry.documents is None else entry.documents,
            max_rejects=self.max_rejects if entry.max_rejects is None else entry.max_rejects,
            store=store,
            validation_store=validation_store if entry.validation_corpus or hold_out or _splits(clean) else None,
        )

    @cached_property
    def workers(self) -> int:
        """Processes for the tokenizer and the stores."""
        return self.processes or cores()


def read_pipeline(file: Path) -> Pipeline:
    """The pipeline in `file`.

    Raises:
        UserError: every problem on a line of its own: file, key path, expected, got, nearest known key.
    """
    try:
        return Pipeline.model_validate(read_json(file))
    except ValidationError as error:
        raise UserError("\n".join(f"{file.name}: {problem}" for problem in explain(error, Pipeline))) from None
