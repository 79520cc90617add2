"""One corpus of a pipeline: its files, its held-out documents, the inputs of its stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from terakoya.corpus.beginnings import check_beginnings
from terakoya.corpus.cleaning import AddCleaning
from terakoya.corpus.corpus import Corpus
from terakoya.corpus.files import Source, find_files
from terakoya.errors import UserError
from terakoya.plugins.cleaning import read_cleaning
from terakoya.preparation.options import PrepareOptions
from terakoya.preparation.prepare import prepare_store
from terakoya.preparation.word_borders import find_word_finder
from terakoya_pipeline.hold_out import hold_out
from terakoya_pipeline.settings import CorpusSettings, Pipeline
from terakoya_pipeline.stages import content_digest

Part = Literal["train", "validation"]


class PipelineCorpus:
    """A corpus of a pipeline; its files are read when they are first needed."""

    def __init__(self, settings: CorpusSettings, pipeline: Pipeline) -> None:
        self.settings, self._pipeline = settings, pipeline
        self._digests: dict[Source, str] = {}  # both parts may read the same files

    def check(self) -> None:
        """Raises UserError for wrong settings and, if the corpus has a name, for missing files."""
        self._add_cleaning()
        if self._pipeline.words is not None:
            find_word_finder(self._pipeline.words).finder.fingerprint()
        if self.settings.name:
            self._find("corpus")
            if self.settings.validation_corpus:
                self._find("validation_corpus")

    # ---------------------------------------------------------------------------------------------- documents

    @cached_property
    def whole(self) -> Corpus:
        """The corpus as given; if there are cleaning steps, cleaned and without the documents that they hold out."""
        return self._corpus("train")

    @cached_property
    def parts(self) -> Mapping[Part, Corpus]:
        """The documents for training and for validation."""
        settings = self.settings
        if settings.validation_corpus or settings.splits:
            return {"train": self.whole, "validation": self._corpus("validation")}
        if not settings.hold_out:
            return {"train": self.whole}
        folder = settings.store.with_name(settings.store.name + ".split")
        with self._naming_errors("hold_out"):
            train, held_out = hold_out(self.whole, settings.hold_out, folder)
        return {"train": replace(self.whole, sources=train), "validation": replace(self.whole, sources=[held_out])}

    def tokenizer_corpus(self) -> Corpus:
        """Returns the documents that the tokenizer learns from, without held-out documents if the corpus has a name.
        Raises UserError if the beginnings of the files hold too many rejects, most likely because `field` is wrong."""
        corpus = self.parts["train"] if self.settings.name else self.whole
        with self._naming_errors("corpus"):
            check_beginnings(corpus)
        if corpus.cleaning is not None:
            corpus.cleaning.make_plan(corpus, processes=self._pipeline.workers, name=self.settings.name)
        return corpus

    def tokenizer_inputs(self) -> dict[str, Any]:
        """Returns everything that the documents of `tokenizer_corpus` depend on, as JSON values."""
        settings = self.settings
        return {
            "corpus": self.whole.fingerprint,
            **self._read_inputs(),
            **({"hold_out": settings.hold_out} if settings.name else {}),
        }

    def _read_inputs(self) -> dict[str, Any]:
        """Returns how the files are read and cleaned, as far as documents depend on it."""
        reading = {name: self.settings.reading[name] for name in ("field", "documents", "encoding")}
        steps = {"clean": self.settings.clean} if self.settings.clean else {}
        return {name: value for name, value in reading.items() if value is not None} | steps

    def _corpus(self, part: Part) -> Corpus:
        """Returns the files for training or for validation, with their cleaning steps."""
        settings = self.settings
        held_out = part == "validation" and settings.splits
        files = self._find("corpus" if part == "train" or held_out else "validation_corpus")
        corpus = Corpus(files, **settings.reading, digests=self._digests)
        add_cleaning = self._add_cleaning()
        if add_cleaning is None:
            return corpus
        with self._naming_errors("clean"):
            return add_cleaning(corpus, self._clean_folder(part), held_out)

    def _add_cleaning(self) -> AddCleaning | None:
        settings = self.settings
        return read_cleaning(settings.clean, f"pipeline: {settings.key}clean") if settings.clean else None

    def _clean_folder(self, part: Part) -> Path:
        settings = self.settings
        store = settings.store if part == "train" or settings.splits else settings.validation_store
        assert store is not None
        return store.with_name(f"{store.name}.clean")

    def _find(self, key: Literal["corpus", "validation_corpus"]) -> tuple[Source, ...]:
        with self._naming_errors(key):
            return find_files(self.settings.corpus if key == "corpus" else self.settings.validation_corpus)

    @contextmanager
    def _naming_errors(self, key: str) -> Iterator[None]:
        """Prefixes errors with the corpus's key if there are several corpora."""
        try:
            yield
        except UserError as error:
            if not self.settings.name:
                raise
            text = str(error).removeprefix("corpus: ").removeprefix(f"{key}: ")
            raise UserError(f"{self.settings.key}{key}: {text}") from error

    # ------------------------------------------------------------------------------------------------- stores

    def store_folders(self) -> Mapping[Part, Path]:
        """Returns the folders of the stores by their part."""
        settings = self.settings
        validation = settings.validation_store
        return {"train": settings.store, **({"validation": validation} if validation is not None else {})}

    def store_inputs(self, part: Part) -> Mapping[str, Any]:
        """Returns the settings and inputs of the store of `part`, as JSON values."""
        settings = self.settings
        corpus = self.whole if part == "train" or settings.hold_out else self.parts[part]
        return {
            "corpus": corpus.fingerprint,
            "tokenizer": content_digest(self._pipeline.tokenizer_folder),
            **self._read_inputs(),
            "unit": self._pipeline.unit,
            "hold_out": settings.hold_out,
            **({"words": self._pipeline.words} if self._pipeline.words is not None else {}),
        }

    def prepare(self, part: Part) -> Mapping[str, Any]:
        """Makes the store of `part`; returns its counts."""
        settings, pipeline = self.settings, self._pipeline
        options = PrepareOptions(
            sources=self.parts[part].sources,
            tokenizer=pipeline.tokenizer_folder,
            out=self.store_folders()[part],
            processes=pipeline.workers,
            unit=pipeline.unit,
            words=pipeline.words,
            clean=settings.clean or None,
            clean_folder=self._clean_folder(part) if settings.clean else None,
            held_out=part == "validation" and settings.splits,
            **settings.reading,
        )
        result = prepare_store(options)
        return {"documents": result.documents, "tokens": result.tokens, "rejected": result.rejected}
