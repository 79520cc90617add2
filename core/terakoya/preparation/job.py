"""A job that prepares a store, the same for both engines: its inputs, how it begins, and how parts become the store."""

from __future__ import annotations

import errno
import hashlib
import logging
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import orjson

from terakoya.atomic_files import lock_folder
from terakoya.components import Tokenizer
from terakoya.components.record_format import RecordFormat
from terakoya.corpus.corpus import Corpus
from terakoya.corpus.documents import Reject
from terakoya.corpus.rejects import Rejects, describe_rejects, has_many_rejects
from terakoya.corpus.unread_text import warn_of_unread
from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found
from terakoya.plugins import registry
from terakoya.preparation.disk_space import check_disk_space
from terakoya.preparation.encoding import BlockEncoder, EncodingTask
from terakoya.preparation.options import PrepareOptions
from terakoya.preparation.resuming import read_finished, record_inputs, remove_other_store
from terakoya.preparation.sharding import Shard, ShardBlocks
from terakoya.preparation.word_borders import NamedFinder, describe_borders
from terakoya.store.assembly import StoreHead, assemble_store, write_rejects
from terakoya.store.recorded_options import SHARD, SHARD_BLOCKS, UNKNOWN, WORDS_INPUT
from terakoya.store.token_store import PARTS, Counts, StoreFacts, TokenStore
from terakoya.store.writer import PartsContent
from terakoya.tokenization.languages import warn_of_lost_dakuten

logger = logging.getLogger("terakoya")


_MANY_UNKNOWN = 0.05
"""A larger share of unknown tokens is a mistake rather than rare characters."""
_MIN_BLOCK, _MAX_BLOCK, _MAX_PARTS = 1 << 20, 32 << 20, 50_000


@dataclass(frozen=True)
class PrepareJob:
    """A store to be made by either engine; picklable.

    Attributes:
        inputs: hashes of what the store is made from; a store or parts with other hashes belong to another job.
        recorded: the settings as `store.json` records them and as messages show them.
        files: size and modification time of each corpus file when the job was created.
    """

    options: PrepareOptions
    task: EncodingTask
    inputs: dict[str, str]
    recorded: dict[str, str | int | bool | None]
    block_bytes: int
    shard: Shard | None
    files: list[tuple[int, object]]

    @classmethod
    def create(
        cls,
        options: PrepareOptions,
        corpus: Corpus,
        tokenizer: Tokenizer,
        records: RecordFormat | None = None,
        words: NamedFinder | None = None,
    ) -> Self:
        """Reads the whole corpus once, for its fingerprint. `records` are the corpus's, with all that they need. Raises
        UserError for an unknown unit and for a missing tokenizer folder."""
        folder, unit, append_eos = options.tokenizer, options.unit, options.append_eos
        shard = Shard.parse(options.shard) if options.shard is not None else None
        if unit not in ("document", "line"):
            raise UserError(f'unit: expected "document" or "line", got "{unit}"')
        if not folder.is_dir():
            raise UserError(f"{folder}: expected a tokenizer's folder, got {describe_found(folder, 'tokenizer')}")
        files = corpus.sizes_and_times()
        block_bytes = _block_bytes(corpus)
        recorded: dict[str, str | int | bool | None] = {
            "unit": unit,
            "append_eos": append_eos,
            "field": corpus.field,
            "documents": corpus.documents,
            "max_document_bytes": corpus.max_document_bytes,
            "block_bytes": block_bytes,
            "tokenizer": f"{type(tokenizer).__name__} {tokenizer.model_dump_json()}",
        }
        if corpus.encoding is not None:
            recorded["encoding"] = corpus.encoding
        if corpus.cleaning is not None:
            recorded.update(corpus.cleaning.facts)
        if records is not None:
            recorded |= records.recorded
        if words is not None:
            recorded["words"] = words.recorded
        inputs = {
            "corpus": corpus.fingerprint,
            **{f"tokenizer {name}": value for name, value in sorted(tokenizer.fingerprint(folder).items())},
            "options": hashlib.sha256(orjson.dumps(recorded)).hexdigest(),
        }
        if records is not None:
            inputs |= records.inputs
        if words is not None:
            inputs[WORDS_INPUT] = words.fingerprint
        if shard is not None:
            inputs[SHARD] = recorded[SHARD] = str(shard)
        task = EncodingTask(
            corpus,
            pickle.dumps(tokenizer),
            folder,
            options.out / PARTS,
            unit,
            append_eos,
            records,
            None if words is None else pickle.dumps(words.finder),
        )
        return cls(options, task, inputs, recorded, block_bytes, shard, files)

    @property
    def out(self) -> Path:
        """The store's folder."""
        return self.options.out

    def blocks(self) -> ShardBlocks:
        """Returns the blocks to encode, in the order of their parts' numbers."""
        return ShardBlocks(self.task.corpus, self.shard or Shard(), block_bytes=self.block_bytes)

    @contextmanager
    def lock_folder(self) -> Iterator[None]:
        """Keeps other processes out of `out`, and explains a full disk or an interrupt. Raises UserError if another
        process has locked it."""
        self.out.mkdir(parents=True, exist_ok=True)
        with lock_folder(self.out), _explain_interruptions(self.out):
            yield

    def find_finished(self) -> StoreFacts | None:
        """Returns the facts of the store if it is finished already. The option `force` removes another store first.
        Raises UserError if `out` holds anything else, if jobs of a plugin are at work on it, and for `force` with a
        tokenizer that is in `out`."""
        for _, listener in registry().called["check_parts"] if self.task.parts.exists() else ():
            listener(parts=self.task.parts)
        if self.options.force:
            tokenizer = self.options.tokenizer
            if tokenizer.resolve().is_relative_to(self.out.resolve()):
                raise UserError(
                    f"{tokenizer}: is in {self.out}, whose store --force removes; copy the tokenizer to another place "
                    "first"
                )
            remove_other_store(self.out, self.inputs)
        return read_finished(self.out, self.inputs, self.recorded)

    def begin(self, encoder: BlockEncoder) -> None:
        """Creates the folder of parts. Raises UserError if the disk is much too small or other parts are there."""
        warn_of_lost_dakuten(encoder.encoder, pickle.loads(self.task.tokenizer), self.task.tokenizer_folder)
        check_disk_space(self.out, self.task.corpus, encoder, self.blocks().disk_bytes, unit=self.task.unit)
        record_inputs(self.out, self.inputs, self.recorded)

    def finish(self, totals: Counts, parts: int, encoder: BlockEncoder, *, extent: str = "") -> StoreFacts:
        """Joins the first `parts` parts, whose sums are `totals`, into the store. `extent`: where the shard's blocks
        begin and end. Raises UserError if a corpus file has changed, for too many rejects, and if there is no
        document."""
        if self.task.corpus.sizes_and_times() != self.files:
            raise UserError("corpus: a file was changed while it was read; leave the files alone and start again")
        cleaning = self.task.corpus.cleaning
        if not totals.tokens and cleaning is not None and (hint := cleaning.explain_empty()) is not None:
            raise UserError(f"{self.out}: expected at least one document, {hint}")
        content = PartsContent(self.out, parts, totals)
        self._check_rejects(content)
        records = self.task.records
        if records is not None:
            records.tell(totals.notes, totals.documents)
        warn_of_unread(totals.notes)
        _tell_unknown(totals)
        if self.task.words is not None:
            logger.info("%s", describe_borders(totals.notes))
        head = StoreHead(
            encoder.encoder.vocabulary,
            self.task.unit,
            encoder.eos,
            self.task.tokenizer_folder,
            self.inputs,
            self.recorded if self.shard is None else {**self.recorded, SHARD_BLOCKS: extent},
            {} if records is None else records.tokenizer_files,
        )
        facts = assemble_store(self.out, content, head)
        if records is not None:
            records.tell_store(self.out, TokenStore.open(self.out, headers_only=True).learned_tokens / facts.tokens)
        return facts

    def count_documents(self, totals: Counts) -> int:
        """Returns how many documents were read where `totals` are in the store: cleaning takes some, rejects stay."""
        cleaning, shards = self.task.corpus.cleaning, 1 if self.shard is None else self.shard.count
        return totals.documents if cleaning is None else max(totals.documents, cleaning.documents // shards)

    def _check_rejects(self, content: PartsContent) -> None:
        """Logs rejects and special tokens in the text. Raises UserError for too many rejects, or if there is no
        document."""
        totals, out, shard, max_rejects = content.totals, self.out, self.shard, self.options.max_rejects
        documents = self.count_documents(totals)
        if totals.literals:
            logger.info(
                "special tokens in the text: %s",
                ", ".join(f"{token} {count:,} times" for token, count in Counter(totals.literals).most_common()),
            )
        if not totals.rejected:
            if not totals.tokens:
                hint = (
                    "the corpus has none; give files that hold text"
                    if shard is None
                    else f"shard {shard} has none; make fewer shards"
                )
                raise UserError(f"{out}: expected at least one document, {hint}")
            return
        write_rejects(out, content)
        listed = out / "rejects.jsonl"
        if has_many_rejects(totals.rejected, documents, max_rejects) or not totals.tokens:
            rejects = Rejects(documents if totals.tokens else 0)
            with listed.open("rb") as stream:
                for record in map(orjson.loads, stream):
                    rejects.add(Reject(**record))
            explained = rejects.explain(
                max_rejects,
                note="or allow more (what is encoded is kept)",
                further=None if self.task.records is None else self.task.records.remedies,
            )
            raise UserError(f"{out}: {explained}\nAll are in {listed}")
        logger.warning("rejected %s; listed in %s", describe_rejects(totals.rejected, documents), listed)


def _tell_unknown(totals: Counts) -> None:
    """Logs the share of unknown tokens."""
    share = totals.notes.get(UNKNOWN, 0) / totals.tokens
    if share > _MANY_UNKNOWN:
        logger.warning(
            "%.1f %% of the tokens are unknown: the tokenizer has no pieces for this text; see what it is with "
            "`terakoya store sample` (text in ISO-2022-JP is valid UTF-8, too), or train a tokenizer on it",
            100 * share,
        )
    elif share:
        logger.info("%.3f %% of the tokens are unknown", 100 * share)


def _block_bytes(corpus: Corpus) -> int:
    """Returns the bytes of a block: few enough to split a small corpus evenly, enough for few parts of a large
    corpus."""
    size = min(corpus.block_bytes, max(_MIN_BLOCK, corpus.total_bytes // 64))
    return max(size, min(_MAX_BLOCK, corpus.total_bytes // _MAX_PARTS))


@contextmanager
def _explain_interruptions(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"{out}: the disk is full ({error.strerror}); make room and run the same command again: finished parts are "
            "kept"
        ) from error
    except KeyboardInterrupt:
        logger.warning("interrupted; finished parts are kept: run the same command again and it finishes what is left")
        raise
