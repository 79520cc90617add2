"""One corpus of a pipeline: its files, what is held out of it, what its stores are made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from terakoya.corpus.cleaning_plan import make_plan
from terakoya.corpus.cleaning_steps import Step, parse_steps
from terakoya.corpus.corpus import Corpus, Reject
from terakoya.corpus.files import Source, find_files
from terakoya.corpus.hold_out import hold_out
from terakoya.errors import UserError
from terakoya.pipeline.settings import CorpusSettings, Pipeline
from terakoya.pipeline.stages import content_digest

Part = Literal["train", "validation"]


class PipelineCorpus:
    """A corpus of a pipeline; files are read when they are first needed."""

    def __init__(self, settings: CorpusSettings, pipeline: Pipeline) -> None:
        self.settings, self._pipeline = settings, pipeline

    def check(self) -> None:
        """Finds wrong settings and, in a corpus with a name, missing files before the first stage starts."""
        self._steps()
        if self.settings.name:
            self._find("corpus")
            if self.settings.validation_corpus:
                self._find("validation_corpus")

    # ---------------------------------------------------------------------------------------------- documents

    @cached_property
    def whole(self) -> Corpus:
        """The corpus as given; cleaned, and without what cleaning holds out, if there are steps."""
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
        with self._named("hold_out"):
            train, held_out = hold_out(self.whole, settings.hold_out, folder)
        options: Any = {"field": settings.field, "documents": settings.documents}
        return {"train": Corpus(train, **options), "validation": Corpus([held_out], **options)}

    def to_learn_from(self) -> Corpus:
        """What the tokenizer sees: of a corpus with a name nothing that is held out.

        Raises UserError where the corpus begins with nothing that is a document: most likely another field is meant.
        """
        corpus = self.parts["train"] if self.settings.name else self.whole
        with self._named("corpus"):
            _check_beginning(replace(corpus, cleaning=None))
        if corpus.cleaning is not None:
            make_plan(corpus, processes=self._pipeline.workers, name=self.settings.name)
        return corpus

    def facts(self) -> dict[str, Any]:
        """What the documents of `to_learn_from` depend on, as JSON values."""
        settings = self.settings
        return {
            "corpus": self.whole.fingerprint,
            "field": settings.field,
            "documents": settings.documents,
            **({"hold_out": settings.hold_out} if settings.name else {}),
            **({"clean": settings.clean} if settings.clean else {}),
        }

    def _corpus(self, part: Part) -> Corpus:
        """The files for training or for validation, to be cleaned."""
        settings = self.settings
        held_out = part == "validation" and settings.splits
        files = self._find("corpus" if part == "train" or held_out else "validation_corpus")
        corpus = Corpus(files, field=settings.field, documents=settings.documents)
        steps = self._steps()
        if not steps:
            return corpus
        with self._named("clean"):
            return corpus.with_cleaning(steps, self._clean_folder(part), held_out=held_out)

    def _steps(self) -> tuple[Step, ...]:
        settings = self.settings
        source = f"pipeline: {settings.key}clean"
        return parse_steps(settings.clean, source=source) if settings.clean else ()

    def _clean_folder(self, part: Part) -> Path:
        settings = self.settings
        store = settings.store if part == "train" or settings.splits else settings.validation_store
        assert store is not None
        return store.with_name(f"{store.name}.clean")

    def _find(self, key: Literal["corpus", "validation_corpus"]) -> tuple[Source, ...]:
        with self._named(key):
            return find_files(self.settings.corpus if key == "corpus" else self.settings.validation_corpus)

    @contextmanager
    def _named(self, key: str) -> Iterator[None]:
        """Errors that say which of several corpora they are about."""
        try:
            yield
        except UserError as error:
            if not self.settings.name:
                raise
            text = str(error).removeprefix("corpus: ").removeprefix(f"{key}: ")
            raise UserError(f"{self.settings.key}{key}: {text}") from error

    # ------------------------------------------------------------------------------------------------- stores

    def stores(self) -> Mapping[Part, Path]:
        """The folders of the stores, by what they are for."""
        settings = self.settings
        validation = settings.validation_store
        return {"train": settings.store, **({"validation": validation} if validation is not None else {})}

    def store_from(self, part: Part) -> Mapping[str, Any]:
        """What the store of `part` is made from, as JSON values."""
        settings = self.settings
        corpus = self.whole if part == "train" or settings.hold_out else self.parts[part]
        return {
            "corpus": corpus.fingerprint,
            "tokenizer": content_digest(self._pipeline.tokenizer_folder),
            "field": settings.field,
            "documents": settings.documents,
            "unit": self._pipeline.unit,
            "hold_out": settings.hold_out,
            **({"clean": settings.clean} if settings.clean else {}),
        }

    def prepare(self, part: Part) -> Mapping[str, Any]:
        """Makes the store of `part`; returns its counts."""
        from terakoya.preparation.prepare import prepare

        settings, pipeline = self.settings, self._pipeline
        facts = prepare(
            self.parts[part].sources,
            tokenizer=pipeline.tokenizer_folder,
            out=self.stores()[part],
            processes=pipeline.workers,
            documents=settings.documents,
            field=settings.field,
            unit=pipeline.unit,
            max_rejects=settings.max_rejects,
            clean=settings.clean or None,
            clean_folder=self._clean_folder(part) if settings.clean else None,
            held_out=part == "validation" and settings.splits,
        )
        return {"documents": facts.documents, "tokens": facts.tokens, "rejected": facts.rejected}


def _check_beginning(corpus: Corpus) -> None:
    block = next(corpus.blocks(block_bytes=1 << 20), None)
    items = [] if block is None else list(corpus.read(block))
    reasons = Counter(item.reason for item in items if isinstance(item, Reject))
    if items and reasons.total() == len(items):
        reason, count = reasons.most_common(1)[0]
        raise UserError(
            f"{items[0].file}: expected documents, got {count:,} times {reason} at its beginning; look at field "
            f'("{corpus.field}") and documents ("{corpus.documents}")'
        )
