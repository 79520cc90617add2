"""A pipeline of several corpora: one store each, one tokenizer, and after a change only the affected stages run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.store.token_store import TokenStore
from terakoya_pipeline.run import Pipeline, _Plan, read_pipeline, run_pipeline
from terakoya_pipeline.settings import CorpusSettings
from terakoya_pipeline.stages import StageResult, run_stages

PARAMETERS: dict[str, Any] = {
    "data": {"sequence_length": 32},
    "architecture": {
        "type": "gpt2",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    },
    "objective": {"type": "causal_lm"},
    "optimizer": {"type": "adamw"},
    "schedule": {"type": "linear"},
    "batch_size": {"-1": 2},
    "max_steps": 2,
}


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """Three corpora, each held out in a different way, with a byte-level tokenizer."""
    for name, letter in (("wiki", "w"), ("fiction", "f"), ("tech", "t"), ("tech.val", "v")):
        texts = "".join(json.dumps({"text": f"{letter}{n} {letter * 3}"}) + "\n" for n in range(40))
        (tmp_path / f"{name}.jsonl").write_text(texts)
    return {
        "corpora": {
            "wiki": {"corpus": str(tmp_path / "wiki.jsonl"), "weight": 70},
            "fiction": {
                "corpus": str(tmp_path / "fiction.jsonl"),
                "weight": 20,
                "clean": [{"type": "length", "min_characters": 7}, {"type": "hold_out", "share": 0.3}],
            },
            "tech": {
                "corpus": [str(tmp_path / "tech.jsonl")],
                "weight": 10,
                "validation_corpus": str(tmp_path / "tech.val.jsonl"),
            },
        },
        "hold_out": 5,
        "tokenizer": {"type": "byte_bpe", "vocab_size": 300},
        "parameters": PARAMETERS,
        "processes": 1,
        **{key: str(tmp_path / "out" / key) for key in ("tokenizer_folder", "run", "export")},
        **{key: str(tmp_path / "out" / key) for key in ("store", "validation_store")},
    }


def _changed(keys: dict[str, Any], name: str, **changes: Any) -> dict[str, Any]:
    return {**keys, "corpora": {**keys["corpora"], name: {**keys["corpora"][name], **changes}}}


def _make(keys: dict[str, Any], *, redo: bool = False) -> dict[str, StageResult]:
    """Runs all stages but training and export."""
    plan = _Plan(Pipeline.model_validate(keys))
    plan.check()
    return {result.name: result for result in run_stages(plan.stages()[:-2], redo=redo)}


def _skipped(keys: dict[str, Any], *, redo: bool = False) -> set[str]:
    return {name for name, result in _make(keys, redo=redo).items() if result.skipped}


ALL = ["tokenizer", "prepare wiki", "prepare validation wiki", "prepare fiction", "prepare validation fiction",
       "prepare tech", "prepare validation tech"]  # fmt: skip


def test_each_corpus_has_its_own_stores_and_held_out_documents_are_not_learnt(keys: dict[str, Any]) -> None:
    made = _make(keys)
    assert list(made) == ALL
    assert (made["prepare wiki"].facts["documents"], made["prepare validation wiki"].facts["documents"]) == (35, 5)
    fiction = [made[f"prepare {part}fiction"].facts["documents"] for part in ("", "validation ")]
    assert sum(fiction) == 30  # f0 to f9 are too short
    assert all(fiction)
    assert (made["prepare tech"].facts["documents"], made["prepare validation tech"].facts["documents"]) == (40, 40)
    assert made["tokenizer"].facts["documents"] == 35 + fiction[0] + 40
    store = TokenStore.open(Path(keys["validation_store"]) / "fiction")
    assert store.facts.documents == fiction[1]
    assert _skipped(keys) == set(ALL)


def test_training_gets_weights_and_every_validation_store(keys: dict[str, Any]) -> None:
    data = Parameters.from_dict(_Plan(Pipeline.model_validate(keys))._parameters(), source="parameters").data
    assert [(Path(each.store).name, each.weight) for each in data.train] == [
        ("wiki", 70),
        ("fiction", 20),
        ("tech", 10),
    ]
    assert [Path(each).name for each in data.validation] == ["wiki", "fiction", "tech"]
    without = _changed(keys, "wiki", hold_out=0)
    data = Parameters.from_dict(_Plan(Pipeline.model_validate(without))._parameters(), source="parameters").data
    assert [Path(each).name for each in data.validation] == ["fiction", "tech"]


def test_a_changed_corpus_is_named_and_only_affected_stages_run_again(keys: dict[str, Any]) -> None:
    _make(keys)
    keys = {**keys, "tokenizer": None}  # from now on used as it is
    tech = Path(keys["corpora"]["tech"]["corpus"][0])
    tech.write_text(tech.read_text().replace("t9", "T9"))
    with pytest.raises(UserError, match="made from other input; changed: corpus"):
        _make(keys)
    others = {name for name in ALL if name not in ("tokenizer", "prepare tech")}
    assert _skipped(keys, redo=True) == others


def test_the_tokenizer_names_the_corpus_that_has_changed(keys: dict[str, Any]) -> None:
    _make(keys)
    with pytest.raises(
        UserError, match=r"tokenizer_folder: was made from other settings: corpora\.wiki\.hold_out: 5 -> 6"
    ):
        _make(_changed(keys, "wiki", hold_out=6))
    turned = {**keys, "corpora": dict(reversed(keys["corpora"].items()))}
    with pytest.raises(UserError, match="other settings: order: "):
        _make(turned)
    assert _skipped(_changed(keys, "wiki", weight=1)) == set(ALL)


def test_omitted_keys_have_the_pipelines_values(keys: dict[str, Any]) -> None:
    def settings(**changes: Any) -> list[CorpusSettings]:
        return list(Pipeline.model_validate({**keys, **changes}).sources)

    wiki, fiction, tech = settings(field="body", documents="line", max_rejects=3, encoding="euc-jp")
    assert (wiki.hold_out, fiction.hold_out, tech.hold_out) == (5, 0, 0)
    expected = {"field": "body", "documents": "line", "max_rejects": 3, "encoding": "euc-jp"}
    assert all(source.reading == expected for source in (wiki, fiction, tech))
    wiki, fiction, tech = settings(hold_out=0, clean=[{"type": "nfkc"}])
    assert [len(source.clean) for source in (wiki, fiction, tech)] == [1, 2, 1]
    assert wiki.validation_store is None


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("wiki", {"corpus": "nowhere/*.jsonl"}, r"^corpora\.wiki\.corpus: no file matches nowhere/\*\.jsonl"),
        ("wiki", {"corpus": "nowhere.jsonl"}, r"^corpora\.wiki\.corpus: nowhere\.jsonl: no such file"),
        ("tech", {"validation_corpus": "no.txt"}, r"^corpora\.tech\.validation_corpus: no\.txt: no such file"),
        ("fiction", {"clean": [{"type": "nfck"}]}, r'corpora\.fiction\.clean\.0\.type: .*did you mean "nfkc"'),
        (
            "tech",
            {"field": "body"},
            r"^corpora\.tech\.corpus: .* got 40 of 40 documents \(40 missing field\), the first in .*tech\.jsonl",
        ),
        ("wiki", {"hold_out": 40}, r"^corpora\.wiki\.hold_out: expected fewer documents"),
    ],
)
def test_errors_name_the_corpus(keys: dict[str, Any], name: str, changes: dict[str, Any], message: str) -> None:
    keys = {**_changed(keys, name, **changes), "hold_out": 0}
    with pytest.raises(UserError, match=message):
        list(run_pipeline(Pipeline.model_validate(keys)))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("wiki", {"weight": 0}, r"corpora\.wiki\.weight\n.*greater than 0"),
        ("wiki", {"weight": -1}, r"corpora\.wiki\.weight\n.*greater than 0"),
        ("tech", {"weight": 0.0001}, r"corpora\.tech\.weight: 0.0001 is less than one row in 65,536"),
        ("wiki", {"clean": [{"type": "nfkc"}]}, r"corpora\.wiki\.clean: give hold_out as the last step"),
        ("tech", {"hold_out": 3}, r"corpora\.tech\.hold_out: give validation_corpus or hold_out, not both"),
    ],
)
def test_wrong_entries_are_refused(keys: dict[str, Any], name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pipeline.model_validate(_changed(keys, name, **changes))


def test_an_unknown_key_of_an_entry_has_a_nearest_name(keys: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(_changed(keys, "wiki", wieght=3)))
    with pytest.raises(UserError, match=r'p\.json: corpora\.wiki\.wieght: unknown key; did you mean "weight"\?'):
        read_pipeline(tmp_path / "p.json")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a.clean", " a", "-a", "Wiki"])
def test_a_name_that_cannot_be_a_folder_name_is_refused(keys: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=r"expected a plain name|differ in more than capitals"):
        Pipeline.model_validate({**keys, "corpora": {**keys["corpora"], name: keys["corpora"]["wiki"]}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpora": {}}, "expected either corpus or corpora, got neither"),
        ({"corpus": ["wiki.jsonl"]}, "expected either corpus or corpora, got both"),
        ({"validation_corpus": ["v.jsonl"]}, "validation_corpus: give it inside each of corpora"),
        ({"validation_store": None}, "validation_store goes together"),
    ],
)
def test_keys_that_conflict_with_corpora_are_refused(
    keys: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Pipeline.model_validate({**keys, **changes})


def test_a_stores_folder_that_is_a_store_itself_is_refused(keys: dict[str, Any]) -> None:
    Path(keys["store"]).mkdir(parents=True)
    (Path(keys["store"]) / "store.json").write_text("{}")
    with pytest.raises(UserError, match="expected a folder that holds a store for each of corpora"):
        list(run_pipeline(Pipeline.model_validate(keys)))


def test_a_record_without_a_new_setting_is_up_to_date(keys: dict[str, Any], tmp_path: Path) -> None:
    plan = _Plan(Pipeline.model_validate(keys))
    train = plan.stages()[-2]
    parameters = dict(plan._parameters())
    removed = parameters.pop("logging_steps")
    assert train.upgrade({"parameters": parameters, "stores": []}) == {
        "parameters": plan._parameters(),
        "stores": [],
    }
    assert train.upgrade({"parameters": {**parameters, "logging_steps": removed + 1}, "stores": []})["parameters"] != (
        plan._parameters()
    )
    gone = {"parameters": {**parameters, "no_such_key": 1}}
    assert train.upgrade(gone) == gone


def test_another_library_or_dictionary_of_the_tokenizer_is_a_change(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from terakoya_plugins.tokenizers.byte_bpe import ByteBpe

    _make(keys)
    before = ByteBpe.fingerprint
    monkeypatch.setattr(ByteBpe, "fingerprint", lambda self, folder: {**before(self, folder), "tokenizers": "0"})
    with pytest.raises(UserError, match=r"made from other input; changed: tokenizer tokenizers"):
        _make(keys)
