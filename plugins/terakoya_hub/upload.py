"""Uploads a model to the Hub: tries it, writes a card, pushes it, and loads it back.

Only huggingface_hub reads the token, from `HF_TOKEN` in the environment or from the file that `hf auth login` writes.
There is no option for it, and it is never written.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from terakoya.atomic_files import check_new_folder, copy_folder, new_folder, scratch_folder
from terakoya.components.tokenizer import load_tokenizer
from terakoya.conversion.export import export
from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found, list_models
from terakoya.inference.loading import find_model
from terakoya.runs.checkpoints import while_kept
from terakoya.runs.finding import find_checkpoint, names_checkpoint
from terakoya.tokenization.languages import guess_languages
from terakoya.toolkit.formats import folder_digests
from terakoya.toolkit.formats.tokenizer_needs import hub_arguments
from terakoya.toolkit.tokenizers.word_splitters import user_dictionaries
from terakoya_hub.card_training import CHART, TrainingFacts
from terakoya_hub.model_card import CARD, Card
from terakoya_hub.options import UploadOptions, UploadResult
from terakoya_hub.published_files import Published, choose_files, refuse_local_paths
from terakoya_hub.scores import Measurement, read_evaluation, read_kept
from terakoya_hub.trial import CONFIG, TOKENIZER, load_class, outputs_of, read_object

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PROBE = "これは日本の文章です。This is a text."
"""Default text for comparing the pushed model with the one that is loaded back."""

SHOWN = 10
"""How many of the files that are not pushed are named."""

logger = logging.getLogger("terakoya")


def upload(source: Path, name: str, **options: Any) -> UploadResult:
    """Pushes the models of `source` to the repository `name` and loads them back from there. `options` are the other
    fields of `UploadOptions`.

    Raises:
        UserError: no model, a model that cannot be loaded, a `run` without the checkpoint that the model is from, no
            token, no permission to push, a file that is a link out of the folder or holds a secret, or
            the model that is loaded back differs.
        TemporaryFailure: the run removed the checkpoint while it was read.
    """
    return upload_model(UploadOptions(source=source, name=name, **options))


def upload_model(options: UploadOptions) -> UploadResult:
    """Uploads as `upload`."""
    source, dry_run = options.source, options.dry_run
    _check_name(options.name)
    if dry_run is not None:
        check_new_folder(dry_run)
    citation = None if options.citation is None else _read_citation(options.citation)
    measured = [result for file in options.evaluations for result in read_evaluation(file)]
    checkpoint = find_checkpoint(source) if names_checkpoint(source) else None  # a run may save another one meanwhile
    with _open(checkpoint or source, options.only, dry_run) as opened, tempfile.TemporaryDirectory() as temporary:
        published = choose_files(opened, options.also)
        folder = _link_files(published, Path(temporary) / "model")
        if dry_run is None:
            _check_token()
        models = {sub: load_class(folder / sub) for sub in list_models(folder)}
        _check_files(folder, models, source)
        custom_code = any("auto_map" in read_object(folder / sub / CONFIG) for sub in models)
        if custom_code and not options.trust_remote_code:
            raise UserError(f"{source}: the model contains its own code; --trust-remote-code allows running it")
        first, text = folder / next(iter(models)), options.prompt or PROBE
        settings = read_object(first / TOKENIZER)
        outputs = {sub: outputs_of(folder / sub, text, trust=custom_code) for sub in models}
        sample = None
        if options.prompt is not None and options.try_model is not None:
            sample = (options.prompt, options.try_model(first if len(models) == 1 else folder, options.prompt))
            options.report(sample[1].rstrip())
        if not (folder / CARD).is_file():
            if options.run is not None:
                checkpoint = _find_origin(source, first, options.run)
            languages = guess_languages(load_tokenizer(first)) if options.languages is None else options.languages
            _write_card(folder, Card(
                options.name, models, None if checkpoint is None else _training_facts(checkpoint),
                license=options.license, languages=languages, sample=sample, tokenizer=settings,
                datasets=options.datasets, dataset_license=options.dataset_license, authors=options.authors,
                evaluations=_with_kept(measured, folder, models), citation=citation,
                weights=_weights(folder, models), trust_remote_code=custom_code,
                discriminators=[sub for sub in models if find_model(folder / sub)[1]],
            ))  # fmt: skip
        elif ignored := ", ".join(option for option, value in options.of_the_card().items() if value):
            logger.warning(
                "%s: its README.md is kept as the card, and these options have no effect: %s; move it away for a "
                "card that is written anew",
                source,
                ignored,
            )
        _report_files(folder, published, options.report)
        if words := hub_arguments(settings, repr(options.name), next(iter(models))):
            code = (
                f"from huggingface_hub import hf_hub_download; AutoTokenizer.from_pretrained({options.name!r}, {words})"
            )
            options.report(f"Transformers finds MeCab's user dictionary outside of the working directory with: {code}")
        if dry_run is not None:
            with new_folder(dry_run) as draft:
                copy_folder(folder, draft)
        if options.process is not None:
            loaded = {(dry_run or folder) / sub: kind for sub, kind in models.items()}
            options.process.check(loaded, trusted=loaded if custom_code else ())
        if dry_run is not None:
            return UploadResult("", None, dry_run, models)
        address, commit = _push(folder, options.name, private=not options.public)
        options.report(f"pushed {commit[:12]}")
        for sub in models:
            beside = user_dictionaries(read_object(folder / sub / TOKENIZER))
            back = outputs_of(options.name, text, subfolder=sub, revision=commit, trust=custom_code, beside=beside)
            if back != outputs[sub]:
                raise UserError(
                    f"{address}: the model loaded back differs from the one pushed from {source / sub}; push it again"
                )
        options.report("loaded the model back: it gives the same numbers")
        return UploadResult(address, commit, None, models)


def _check_name(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--name {name}: expected ORGANISATION/NAME: {error}") from None


def _check_files(folder: Path, models: Iterable[str], source: Path) -> None:
    """Raises UserError where a model has no tokenizer of its own, or one that reads files of this machine."""
    for sub in models:
        refuse_local_paths(folder / sub)
    for sub in models:
        if not (folder / sub / TOKENIZER).is_file():  # without it, Transformers creates an empty tokenizer
            raise UserError(f"{source / sub}: expected the model's tokenizer, found no tokenizer_config.json")


def _with_kept(measured: Sequence[Measurement], folder: Path, models: Iterable[str]) -> list[Measurement]:
    kept = [result for sub in models for result in read_kept(folder / sub)]
    return [*measured, *(result for result in kept if result not in measured)]


def _write_card(folder: Path, card: Card) -> None:
    (folder / CARD).write_text(card.text(), encoding="utf-8")
    if card.facts is not None and (chart := card.facts.loss_chart()) is not None:
        (folder / CHART).unlink(missing_ok=True)  # a link to that of another card
        (folder / CHART).write_text(chart, encoding="utf-8")


@contextmanager
def _open(source: Path, only: str | None, dry_run: Path | None) -> Iterator[Path]:
    """Yields the folder with the models to push: that of `source`, or of a checkpoint an export for as long as the
    block runs, which is where the run is, or the folder of the dry run: the system's temporary folder may be small."""
    if names_checkpoint(source):
        run = next((each for each in source.absolute().parents[:2] if (each / "checkpoints").is_dir()), source)
        here = run if os.access(run.parent, os.W_OK) else Path(tempfile.gettempdir(), run.name)
        with scratch_folder(dry_run or here) as scratch:
            export(source, scratch / "model", only=only)
            yield scratch / "model"
        return
    if only is not None:
        source = source / only
    if not source.is_dir() or not list_models(source):
        raise UserError(
            f"{source}: expected a run, a checkpoint or an exported folder, got "
            f"{describe_found(source, 'Transformers model')}"
        )
    for sub in list_models(source):
        folder_digests.check(source / sub)
    yield source


def _link_files(published: Published, folder: Path) -> Path:
    """Writes links to the files into the new folder `folder`, which is loaded and pushed as it is; returns it."""
    for place, file in published.files.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).symlink_to(file.resolve())
    return folder


def _report_files(folder: Path, published: Published, report: Callable[[str], None]) -> None:
    sizes = {each.relative_to(folder).as_posix(): each.stat().st_size for each in folder.rglob("*") if each.is_file()}
    for place, size in sorted(sizes.items()):
        report(f"{size:>15,} bytes  {place}")
    report(f"{sum(sizes.values()):>15,} bytes in all, {len(sizes):,} files")
    if left_out := published.left_out:
        names = ", ".join(left_out[:SHOWN]) + (f" and {len(left_out) - SHOWN:,} more" if len(left_out) > SHOWN else "")
        report(f"not pushed, as it is no part of the model: {names}; --also FILE pushes a file, too")


def _training_facts(checkpoint: Path) -> TrainingFacts:
    """Reads the facts for the card. Raises TemporaryFailure if the run removes `checkpoint` meanwhile."""
    with while_kept(checkpoint):
        return TrainingFacts.read(checkpoint)


def _find_origin(source: Path, model: Path, run: Path) -> Path:
    """Returns the checkpoint that the folder `model`, with the files of `source`, was exported from: the one that it
    names if `run` is its run, else `run` itself or the newest checkpoint of it.

    Raises:
        UserError: `model` names another checkpoint, which `run` does not have.
    """
    place = folder_digests.read_place(model)
    if place is None:
        return find_checkpoint(run)
    named = run / Path(*PurePosixPath(place).parts[1:])  # the run may have another name now
    found = find_checkpoint(named if folder_digests.is_from(model, named) else run)
    if not folder_digests.is_from(model, found):
        raise UserError(
            f"--run {run}: expected the checkpoint that {source} was exported from, {place}, got {found} with other "
            "weights; name that checkpoint with --run, or export the model again, or leave out --run: the card then "
            "says nothing of the training"
        )
    return found


def _weights(folder: Path, models: Iterable[str]) -> dict[str, str]:
    return {
        f"{sub}/{name}".lstrip("/"): facts.sha256
        for sub in models
        for name, facts in (folder_digests.read(folder / sub) or {}).items()
        if name.endswith(folder_digests.WEIGHTS)
    }


def _read_citation(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        text = ""
    if not text.lstrip().startswith("@") or "```" in text:
        raise UserError(f"--citation {file}: expected a file with an entry of BibTeX, such as @misc{{key, ...}}")
    return text


def _check_token() -> None:
    """Raises UserError if there is no token to push with, before anything is loaded."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise UserError("no token for the Hub: set HF_TOKEN in the environment, or run `hf auth login`")


def _push(folder: Path, name: str, *, private: bool) -> tuple[str, str]:
    """Creates the repository `name` if it does not exist and commits `folder` to it. Returns its address and commit.

    Raises:
        UserError: no permission, or the Hub does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    api: HfApi = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=name, folder_path=folder, commit_message="Model, tokenizer and card")
    except OfflineModeIsEnabled:
        raise UserError("HF_HUB_OFFLINE is set: nothing can be pushed; unset it") from None
    except HfHubHTTPError as error:
        raise UserError(f"{name}: the Hub refused: {str(error).splitlines()[0]}") from None
    except OSError as error:
        if error.filename is not None:  # a file here
            raise
        raise UserError(f"{name}: the Hub does not answer: {error}") from None
    except RuntimeError as error:  # huggingface_hub raises it if a file is not transferred
        raise UserError(f"{name}: {error} {error.__cause__ or ''}; run the same command again") from error
    return str(address), str(commit.oid)
