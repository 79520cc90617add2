"""The keys of a pipeline JSON, with one corpus or with several that have names and weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from terakoya.config import file_kinds
from terakoya.config.fields import ParameterFields
from terakoya.corpus.corpus import Reading
from terakoya.errors import UserError
from terakoya.json_settings import explain, read_settings, refuse_secrets
from terakoya.places import is_local
from terakoya.process_pool import available_cores
from terakoya.rows.blending import PERIOD, integer_weights

Files = Annotated[tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
Count = Annotated[int, Field(ge=0)]
MaxRejects = Count | Annotated[float, Field(ge=0, le=1)]
Documents = Literal["blank", "line"]

_NAME = re.compile(r"\w[\w-]*")


class CorpusEntry(BaseModel):
    """One of the `corpora`. An omitted key has the pipeline's value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpus: Files = Field(min_length=1)
    """Files, folders, patterns or addresses, as in the pipeline's own `corpus`."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The share of the rows of training, in any unit: 70, 20 and 10 are 70 %, 20 % and 10 % of all rows, whatever the
    sizes of the corpora, exact after any number of rows (less than one row off). Each store has its own epochs: a small
    store with a large weight is repeated sooner."""
    validation_corpus: Files = ()
    """Files for validation. An entry that sets its validation data in any of the three ways does not inherit
    `hold_out`."""
    hold_out: Count | None = None
    """The number of documents to take from the end of this corpus for validation. Unit: documents."""
    clean: tuple[dict[str, Any], ...] | None = None
    """The cleaning steps of this corpus, instead of the pipeline's."""
    field: str | None = None
    """The key or column that holds the text of this corpus."""
    documents: Documents | None = None
    """Where a document ends in txt files of this corpus: at a blank line, or at every line."""
    encoding: str | None = None
    """What files of this corpus are whose encoding is not recognised."""
    max_rejects: MaxRejects | None = None
    """How many documents of this corpus may be rejected: a count, or a share of all below 1."""


@dataclass(frozen=True)
class CorpusSettings:
    """One corpus of a pipeline, with every setting resolved.

    Attributes:
        name: "" if the pipeline has only one corpus, without a name.
        store, validation_store: the folders of its own stores; the second is None if nothing is held out.
        The others: see `Pipeline` and `CorpusEntry`.
    """

    name: str
    corpus: Sequence[str]
    weight: float
    validation_corpus: Sequence[str]
    hold_out: int
    clean: tuple[dict[str, Any], ...]
    reading: Reading
    store: Path
    validation_store: Path | None

    @property
    def key(self) -> str:
        """The prefix of its keys in the pipeline: `corpora.wiki.`, or nothing."""
        return f"corpora.{self.name}." if self.name else ""

    @property
    def splits(self) -> bool:
        """Whether a cleaning step holds documents out."""
        return _splits(self.clean)


def _splits(clean: Sequence[Mapping[str, Any]]) -> bool:
    return any(step.get("type") == "hold_out" for step in clean)


class Pipeline(BaseModel):
    """The keys of a pipeline JSON. Paths are relative to the working directory, as on the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpus: Files = Field(default=(), min_length=1, examples=["text/*.jsonl.gz", ["wiki.txt", "web.jsonl"]])
    """Files, folders, patterns such as "text/*.jsonl.gz", or addresses such as "s3://bucket/wiki": one, or a list; or
    give `corpora`."""
    corpora: dict[str, CorpusEntry] = Field(default_factory=dict)
    """Several corpora by name, each with a weight and its own settings. The tokenizer learns from all of them, in the
    order of the file, without held-out documents; each has its own store in the folder `store` and, if it has
    validation data, one in `validation_store`, both under its name."""
    validation_corpus: Files = ()
    """Like `corpus`, for validation; or give `hold_out`."""
    hold_out: Count = Field(default=0, examples=[1000])
    """The number of documents to take from the end of the corpus for validation; or give the cleaning step `hold_out`,
    which chooses documents by a hash of their text. Unit: documents."""
    clean: tuple[dict[str, Any], ...] = Field(
        default=(), examples=[[{"type": "nfkc"}, {"type": "hold_out", "share": 0.01}]]
    )
    """The cleaning steps, in order: each an object with a `type`."""
    field: str = "text"
    """The key or column that holds the text."""
    documents: Documents = "blank"
    """Where a document ends in txt files: at a blank line, or at every line."""
    encoding: str | None = Field(default=None, examples=["shift_jis"])
    """What files are that are not UTF-8, and whose encoding is not recognised: shift_jis, euc-jp, iso-2022-jp, utf-16,
    or another. Null rejects them; utf-8 recognises none."""
    tokenizer: dict[str, Any] | None = Field(default=None, examples=[{"type": "mecab_wordpiece", "vocab_size": 32768}])
    """The tokenizer to train: its `type` and its settings. Without it, the folder `tokenizer_folder` is used as it is.
    """
    tokenizer_folder: Path = Field(examples=["work/tokenizer"])
    """The folder of the tokenizer."""
    store: Path = Field(examples=["work/store"])
    """The folder of the token store for training; with `corpora`, of one store for each."""
    validation_store: Path | None = Field(default=None, examples=["work/validation"])
    """The folder of the token store for validation; needed with validation data."""
    unit: Literal["document", "line"] = "document"
    """What a stored sequence is; the layouts `lines` and `pairs` need `line`."""
    words: str | dict[str, Any] | None = Field(default=None, examples=["mecab"])
    """The word finder whose words the stores keep, for whole-word masking: its name, or an object with its name as
    `type` beside its settings. Null keeps the words that the tokenizer knows, if it does."""
    parameters: Path | dict[str, Any] = Field(examples=["bert_ja"])
    """A parameter file, the name of a preset such as `bert_ja`, or the content of a file. Its `data.train`
    and `data.validation` are the pipeline's stores."""
    run: Path = Field(examples=["work/run"])
    """The run folder."""
    export: Path = Field(examples=["work/model"])
    """The folder of the exported model."""
    max_rejects: MaxRejects = 0.01
    """How many documents may be rejected: a count, or a share of all below 1."""
    processes: int = Field(default=0, ge=0)
    """Processes for the tokenizer and the stores; 0 is one for each core. Unit: processes."""
    training_processes: int | None = Field(default=None, ge=1)
    """Processes for training; null is one for each GPU, and one without a GPU. Unit: processes."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.corpus) == bool(self.corpora):
            raise ValueError("corpus: expected either corpus or corpora, got " + ("both" if self.corpus else "neither"))
        if self.corpora:
            self._check_corpora()
        for source in self.sources:
            if source.validation_corpus and source.hold_out:
                raise ValueError(f"{source.key}hold_out: give validation_corpus or hold_out, not both")
            if source.clean and source.hold_out:
                raise ValueError(
                    f'{source.key}clean: give hold_out as the last step of clean: {{"type": "hold_out", "share": 0.01}}'
                )
            if source.validation_corpus and source.splits:
                raise ValueError(f"{source.key}clean: give validation_corpus or the step hold_out, not both")
        validates = any(each.validation_corpus or each.hold_out or each.splits for each in self.sources)
        if validates != bool(self.validation_store):
            raise ValueError("validation_store goes together with validation_corpus or hold_out")
        if self.tokenizer is not None and not isinstance(self.tokenizer.get("type"), str):
            raise ValueError('tokenizer.type: expected a name such as "mecab_wordpiece"')
        outputs = [self.tokenizer_folder, self.store, self.validation_store, self.run, self.export]
        for path in filter(None, outputs):
            if not is_local(path):
                raise ValueError(f"{path}: expected a folder on this machine, got an address; only a corpus may be one")
        folders = [path.absolute() for path in outputs if path is not None]
        for index, folder in enumerate(folders):
            for other in folders[:index]:
                if folder == other or folder in other.parents or other in folder.parents:
                    raise ValueError(f"{folder} and {other}: expected separate folders, none inside another")
        return self

    def _check_corpora(self) -> None:
        if self.validation_corpus:
            raise ValueError(
                "validation_corpus: give it inside each of corpora, so that each is validated on its own text"
            )
        for name in self.corpora:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f'corpora: "{name}": expected a plain name of letters, digits, _ and -: it becomes a folder'
                )
        if len({name.casefold() for name in self.corpora}) < len(self.corpora):
            raise ValueError("corpora: expected names that differ in more than capitals: each becomes a folder")
        try:
            integer_weights([entry.weight for entry in self.corpora.values()])
        except UserError:
            least = min(self.corpora, key=lambda name: self.corpora[name].weight)
            raise ValueError(
                f"corpora.{least}.weight: {self.corpora[least].weight:g} is less than one row in {PERIOD:,} of this "
                "mixture; raise it or leave the corpus out"
            ) from None

    @cached_property
    def sources(self) -> tuple[CorpusSettings, ...]:
        """Every corpus, in the order of the file."""
        if not self.corpora:
            only = CorpusEntry.model_construct(corpus=self.corpus, validation_corpus=self.validation_corpus)
            return (self._resolve("", only, self.store, self.validation_store),)
        sources = []
        for name, entry in self.corpora.items():
            validation = self.validation_store / name if self.validation_store is not None else None
            sources.append(self._resolve(name, entry, self.store / name, validation))
        return tuple(sources)

    def _resolve(self, name: str, entry: CorpusEntry, store: Path, validation_store: Path | None) -> CorpusSettings:
        """Returns the settings of one corpus: its own, and the pipeline's where the corpus has none."""
        own_validation = bool(name) and (bool(entry.validation_corpus) or _splits(entry.clean or ()))
        hold_out = entry.hold_out if entry.hold_out is not None else 0 if own_validation else self.hold_out
        clean = self.clean if entry.clean is None else entry.clean
        own = {name: getattr(entry, name) for name in Reading.__annotations__}
        reading = {name: getattr(self, name) if value is None else value for name, value in own.items()}
        return CorpusSettings(
            name=name,
            corpus=entry.corpus,
            weight=entry.weight,
            validation_corpus=entry.validation_corpus,
            hold_out=hold_out,
            clean=clean,
            reading=reading,  # type: ignore[arg-type] # see its annotations
            store=store,
            validation_store=validation_store if entry.validation_corpus or hold_out or _splits(clean) else None,
        )

    @cached_property
    def workers(self) -> int:
        """Number of processes for the tokenizer and the stores."""
        return self.processes or available_cores()


def read_pipeline(file: Path) -> Pipeline:
    """Reads the pipeline in `file`. Raises UserError with one line for each problem: file, key path, expected, got,
    nearest known key; also if the file is of another kind, or a value looks like a secret."""
    raw = read_settings(file)
    refuse_secrets(raw, file.name)
    try:
        return Pipeline.model_validate(raw)
    except ValidationError as error:
        file_kinds.refuse_other_kind(file, raw, expected=file_kinds.PIPELINE)
        lines = explain(error, Pipeline, explain_unknown=_explain_unknown)
        raise UserError("\n".join(f"{file.name}: {problem}" for problem in lines)) from None


def _explain_unknown(path: str) -> str:
    """Says where an unknown key at the top of a pipeline belongs, if that is the parameter file."""
    if path in ParameterFields.model_fields:
        return f'; it belongs into the parameter file, or into the object "parameters": "parameters": {{"{path}": ...}}'
    return ""
