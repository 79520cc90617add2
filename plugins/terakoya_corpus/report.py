"""The report of a corpus as JSON values: what a survey counted, and what steps would drop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.plugins.cleaning import read_cleaning
from terakoya_corpus.counting import quantile
from terakoya_corpus.masking import excerpt, find_mask, personal_data_step
from terakoya_corpus.survey import LENGTHS, LINE_CHARACTERS, SAMPLE_CHARACTERS, Survey, survey_corpus
from terakoya_corpus.trial import Trial, try_steps

SHOWN = 20
"""The most sites, lines and repeated texts that a report has."""
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
PERSONAL_CHARACTERS, LANGUAGE_CHARACTERS = 200_000, 2_000
"""The characters of a document that are searched for personal data, and that tell its language."""


def report_corpus(
    corpus: Corpus,
    clean: Path | Sequence[dict[str, Any]] | None = None,
    *,
    processes: int = 1,
    sample_characters: int = SAMPLE_CHARACTERS,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Returns what is in `corpus`, and what the cleaning steps `clean` would drop, as JSON values.

    All of the corpus is read once; what takes longer is measured on a sample of the documents, chosen by the hashes of
    their texts, of `sample_characters` characters at most. No personal data that is found is in the result.

    Raises UserError for wrong steps, and as `survey_corpus`.
    """
    steps: Sequence[Any] = ()
    if clean is not None:
        read_cleaning(clean)  # says which family is missing
        from terakoya_cleaning.reading import load_steps

        steps = load_steps(clean)
    survey = survey_corpus(corpus, processes=processes, sample_characters=sample_characters, progress=progress)
    texts, mask = survey.texts, find_mask()
    sample = list(texts.sample())
    sampled = sum(count for _, count, _ in sample)
    counted_share = texts.limit / 2**64
    duplicates = Counter({name: round(count / counted_share) for name, count in texts.duplicates().items()})
    groups = [
        {
            "name": name,
            "documents": count,
            "characters": survey.group_characters[name],
            "duplicates": min(count, duplicates[name]),
            "duplicate_share": min(count, duplicates[name]) / max(1, count),
        }
        for name, count in survey.groups.counts.most_common(SHOWN)
    ]
    low, high = LINE_CHARACTERS
    return {
        "sources": [each.name for each in survey.files],
        "documents": survey.documents,
        "characters": survey.characters,
        "disk_bytes": sum(each.disk_bytes for each in survey.files),
        "files": [vars(each) for each in survey.files],
        "scripts": dict(survey.scripts.most_common()),
        "damage": {name: count for name, count in survey.damage.items() if count},
        "lengths": {
            "from": list(LENGTHS),
            "documents": survey.lengths.tolist(),
            "quantiles": {str(share): quantile(survey.fine_lengths, share) for share in QUANTILES},
            "longest": dict(zip(("characters", "file", "line"), survey.longest, strict=True)),
        },
        "duplicates": {
            "documents": duplicates.total(),
            "share": texts.duplicates().total() / max(1, texts.counted),
            "counted": texts.counted,
            "is_exact": texts.is_exact,
            "groups": groups,
            "all_groups": len(survey.groups.counts),
            "texts": [
                {"times": count, "file": each.place[0], "line": each.place[1], "text": excerpt(each.text, mask)}
                for count, each in texts.most_frequent(SHOWN // 2)
            ],
        },
        "lines": {
            "characters": [low, high],
            "error": survey.lines.error,
            "repeated": [
                {"times": count, "text": excerpt(line, mask)}
                for line, count in survey.lines.counts.most_common(SHOWN)
                if count > 1
            ],
        },
        "rejected": dict(survey.rejected.most_common()),
        "rejects": [
            {"reason": reason, "file": file, "line": line, "text": excerpt(text, mask)}
            for reason, found in survey.rejects.items()
            for file, line, text in found
        ],
        "sample": {
            "documents": sampled,
            "share": texts.sample_limit / 2**64,
            "is_all": texts.sample_limit == 1 << 64,
        },
        "personal_data": _personal_data(survey, sampled),
        "languages": _languages(survey),
        "cleaning": _describe_trial(try_steps(steps, texts, mask)) if steps else None,
    }


def _personal_data(survey: Survey, sampled: int) -> dict[str, Any] | None:
    """Returns how many documents of the sample have which kind, and how often it is found; None where no plugin finds
    personal data."""
    step: Any = personal_data_step()
    if not hasattr(step, "count"):
        return None
    documents: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for _, count, each in survey.texts.sample():
        for kind, number in step.count(each.text[:PERSONAL_CHARACTERS]).items():
            if number:
                documents[kind] += count
                found[kind] += number * count
    return {
        kind: {"documents": documents[kind], "share": documents[kind] / max(1, sampled), "found": found[kind]}
        for kind, _ in documents.most_common()
    }


def _languages(survey: Survey) -> dict[str, int] | None:
    """Returns how many documents of the sample are in which language, by the cleaning step `language`: with no language
    to stay it says of each text what it is. None where no plugin has the step, or its library is missing."""
    found = registry()
    if "language" not in found.names("cleaning_steps"):
        return None
    try:
        step = found.component("cleaning_steps", "language")(languages=("none",))
        step.versions()
    except (UserError, ValueError):
        return None
    languages: Counter[str] = Counter()
    for _, count, each in survey.texts.sample():
        languages[step.why(each.text[:LANGUAGE_CHARACTERS])] += count
    return dict(languages.most_common()) if any(languages) else None


def _describe_trial(trial: Trial) -> dict[str, Any]:
    keys = ("file", "line", "reason", "text")
    return {
        "documents": trial.documents,
        "steps": [
            {
                "name": each.name,
                "documents": each.documents,
                "dropped": each.dropped,
                "share": each.dropped / max(1, trial.documents),
                "compares": each.compares,
                "examples": [dict(zip(keys, example, strict=True)) for example in each.dropped_examples],
            }
            for each in trial.steps
        ],
        "held_out": trial.held_out,
        "kept": trial.kept,
        "kept_share": trial.kept / max(1, trial.documents),
        "kept_examples": [dict(zip(keys, example, strict=True)) for example in trial.kept_examples],
    }
