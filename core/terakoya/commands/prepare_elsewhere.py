"""`terakoya prepare` where others hand out the work: datatrove's executors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya.errors import UserError

if TYPE_CHECKING:
    from terakoya.components import Tokenizer
    from terakoya.corpus.corpus import Corpus
    from terakoya.preparation.chat_template import ChatTemplate
    from terakoya.preparation.datatrove_settings import Executor
    from terakoya.store.token_store import StoreFacts, Unit


def in_words(out: Path, facts: StoreFacts) -> str:
    """What was made."""
    return (
        f"{out}: {facts.documents:,} documents, {facts.sequences:,} sequences, {facts.tokens:,} tokens; "
        f"{facts.rejected:,} documents rejected"
    )


def run_datatrove(
    corpus: Corpus,
    tokenizer: Tokenizer,
    tokenizer_folder: Path,
    out: Path,
    *,
    unit: Unit,
    append_eos: bool,
    max_rejects: int | float,
    shard: str | None,
    template: ChatTemplate | None,
    processes: int,
    force: bool,
    executor: Executor,
    settings_file: Path | None,
    overrides: Sequence[str],
) -> None:
    """Prepares with `executor` and says what was made, or which jobs were submitted."""
    from terakoya.json_settings import read_json, with_overrides
    from terakoya.log import console
    from terakoya.preparation.datatrove_settings import executor_settings
    from terakoya.preparation.job import Preparation
    from terakoya.preparation.sharding import Shard

    try:
        from terakoya.preparation.datatrove import Submitted, prepare_datatrove
    except ModuleNotFoundError as error:
        raise UserError(f'--engine datatrove: {error}; needs datatrove: pip install "terakoya[datatrove]"') from error
    settings = with_overrides(read_json(settings_file) if settings_file is not None else {}, overrides)
    executor_settings(executor, settings)  # before the corpus is read
    preparation = Preparation.of(
        corpus,
        tokenizer,
        tokenizer_folder,
        out,
        unit=unit,
        append_eos=append_eos,
        max_rejects=max_rejects,
        shard=Shard.parse(shard) if shard is not None else None,
        template=template,
    )
    made = prepare_datatrove(preparation, executor=executor, settings=settings, processes=processes, force=force)
    if isinstance(made, Submitted):
        encoding = f"job {made.encode} encodes, job" if made.encode is not None else "every part is there, job"
        said = f"submitted: {encoding} {made.join} then joins; {out} is finished when there is {out / 'store.json'}"
    else:
        said = in_words(out, made)
    console().print(said, soft_wrap=True, markup=False)
