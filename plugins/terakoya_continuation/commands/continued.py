"""`terakoya init --from MODEL CORPUS`: a pipeline that trains a published model further."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terakoya.errors import UserError

if TYPE_CHECKING:
    from terakoya_continuation.plan import Source, Vocabulary
    from terakoya_continuation.published import PublishedModel
    from terakoya_planning.commands.init import Options

REPLAY_SHARE = 0.2


def init(
    verb: Callable[..., None],
    arguments: Mapping[str, Any],
    *,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Train this model further on CORPUS: a Transformers folder, or a name in the Hub's cache.",
        ),
    ] = None,
    replay: Annotated[
        list[str] | None,
        typer.Option(metavar="CORPUS", help="With --from: general text that keeps what the model knew; repeatable."),
    ] = None,
    replay_share: Annotated[
        float | None, typer.Option(help=f"With --replay: its share of the rows. Default: {REPLAY_SHARE}.")
    ] = None,
) -> None:
    """Writes a pipeline file for the model, if there is one."""
    if from_ is not None:
        _continue(arguments["options"], from_, replay or [], replay_share)
    elif replay or replay_share is not None:
        raise UserError("--replay: is for a model that is trained further; name it with --from MODEL")
    else:
        verb(**arguments)


def _continue(options: Options, name: str, replay: Sequence[str], share: float | None) -> None:
    from terakoya.atomic_files import check_writable, scratch_folder, write_text
    from terakoya.checking.model_check import check_model, check_start
    from terakoya.commands.guidance import next_command
    from terakoya.config.parameters import Parameters
    from terakoya.log import console, error_console, translated
    from terakoya_continuation import plan
    from terakoya_continuation.published import read_model
    from terakoya_pipeline.settings import Pipeline, read_pipeline
    from terakoya_planning.choosing import find_machine
    from terakoya_planning.measuring import measure_here
    from terakoya_planning.new_pipeline import render

    out, work = options.out, options.work / "continued"
    tokenizer = work / "tokenizer"
    _refuse_choices(options, replay, share)
    for path, option in ((out, "--out"), (tokenizer, "--work")):
        if path.exists() and not options.force:
            raise UserError(f"{path}: exists already; choose another name with {option}, or overwrite it with --force")
    check_writable(out.parent)
    share = (REPLAY_SHARE if share is None else share) if replay else 0.0
    model = read_model(name)
    how: Any = {"encoding": options.encoding, "max_rejects": options.max_rejects}
    machine = find_machine(options.gpu, options.gpus, measure=measure_here if options.measure else None)
    hours = options.hours or (24.0 if machine.device.gpu else 2.0)
    with error_console().status(translated("measuring and choosing"), spinner="dots"), scratch_folder(work) as scratch:
        field, vocabulary = _fit_vocabulary(model, options.corpus, scratch / "tokenizer", options.field, **how)
        sources = [field, *([_count(vocabulary, replay, options.field, **how)] if replay else [])]
        fit = vocabulary.used
        finds_words = (
            not fit.knows_words and fit.gives_spans and field.facts.language == "ja" and model.kind == "masked"
        )
        parameters = plan.make_parameters(model, fit.knows_words or finds_words)
        choice = plan.choose_run(model, parameters, vocabulary, sources, share, machine=machine, hours=hours)
        loaded = Parameters.from_dict(plan.complete(model, vocabulary, choice), source="--from")
        check_model(loaded, fit.vocabulary)
        check_start(loaded, fit.vocabulary)
        if vocabulary.extended:
            work.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(tokenizer, ignore_errors=True)
            vocabulary = replace(vocabulary, folder=vocabulary.folder.rename(tokenizer))
    pipeline, comments = plan.make_pipeline(model, vocabulary, choice, sources, share, machine=machine, work=work)
    how |= {"words": "mecab"} if finds_words else {}
    pipeline |= {key: value for key, value in how.items() if value != Pipeline.model_fields[key].default}
    repeated = [word for each in replay for word in ("--replay", each)]
    repeated += [*(["--replay-share", f"{share:g}"] if replay else []), "--hours", f"{hours:g}"]
    heading = options.heading("--from", name, *repeated, *(["--gpu", options.gpu] if options.gpu else []))
    comments = {key: translated(comment) for key, comment in comments.items()}
    write_text(out, render(pipeline, comments, heading=heading))
    read_pipeline(out)
    shown = ("parameters.start_from", "corpus", "corpora.field.corpus", "corpora.replay.corpus", "corpora.replay")
    for key in (*shown, "parameters", "tokenizer_folder", "parameters.max_steps"):
        if key in comments:
            console().print(comments[key], markup=False, soft_wrap=True)
    console().print(f"{out}: written; it gives the reason for each number", markup=False, soft_wrap=True)
    next_command.show("run", out)


def _refuse_choices(options: Options, replay: Sequence[str], share: float | None) -> None:
    """Raises UserError for options that do not go with --from, or with each other."""
    for option, value in {"--family": options.family, "--like": options.like, "--goal": options.goal,
                          "--vocab-size": options.vocab_size}.items():  # fmt: skip
        if value is not None:
            raise UserError(f"{option}: the model of --from decides it; leave {option} out")
    if not options.corpus:
        raise UserError("CORPUS: expected files of text")
    if share is not None and not replay:
        raise UserError(f"--replay-share {share:g}: needs --replay CORPUS")
    if share is not None and not 0 < share < 1:
        raise UserError(f"--replay-share {share:g}: expected a share between 0 and 1")


def _count(vocabulary: Vocabulary, files: Sequence[str], field: str | None, **how: Any) -> Source:
    """Looks at a corpus, and counts the tokens that the run's tokenizer makes of it."""
    from terakoya_continuation.fit import measure_fit, sample_texts
    from terakoya_continuation.plan import Source
    from terakoya_planning.corpus_facts import look_at

    source = Source(files, look_at(files, field=field, **how), 0)
    rate = measure_fit(vocabulary.folder, sample_texts(source.corpus(**how))).rate
    return replace(source, tokens=round(rate * source.facts.characters))


def _fit_vocabulary(
    model: PublishedModel, files: Sequence[str], new: Path, field: str | None, **how: Any
) -> tuple[Source, Vocabulary]:
    """Looks at the text of the field, and decides whether the model gets more pieces for it, whose tokenizer is then
    in the folder `new`."""
    from terakoya import plugins
    from terakoya_continuation import plan
    from terakoya_continuation.fit import measure_fit, sample_texts
    from terakoya_planning.corpus_facts import look_at

    facts = look_at(files, field=field, **how)
    source = plan.Source(files, facts, 0)
    texts = sample_texts(source.corpus(**how))
    fit = measure_fit(model.folder, texts)
    vocabulary = plan.Vocabulary(model.folder, fit)
    if "vocabulary" not in plugins.registry().initial_weights:
        vocabulary = replace(vocabulary, reason="the family growth, which gives a model more pieces, is not there")
    else:
        from terakoya_growth.extend import extend_tokenizer

        try:
            extend_tokenizer(
                model.folder, new, files, add=fit.pieces // plan.MORE, min_frequency=plan.LEAST_OFTEN,
                field=facts.field, documents=facts.documents, **how,
            )  # fmt: skip
        except UserError as error:
            vocabulary = replace(vocabulary, reason=f"it cannot have more pieces ({error})")
        else:
            longer = measure_fit(new, texts)
            vocabulary = replace(vocabulary, longer=longer)
            if fit.saved_by(longer) >= plan.SAVED:
                vocabulary = replace(vocabulary, folder=new, extended=True)
    return replace(source, tokens=round(vocabulary.used.rate * facts.characters)), vocabulary
