"""An architecture whose exported tokenizer does not cut texts to what the model accepts is told so."""

from __future__ import annotations

import pytest

from terakoya.plugins import registry
from terakoya.toolkit.formats import transformers_folder
from terakoya_contract.architecture import ArchitectureCase
from terakoya_contract.exporting import check_long_texts
from terakoya_contract.results import CheckFailed


def test_texts_that_are_cut_to_more_than_the_model_accepts_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ArchitectureCase("architectures", "bert", registry().component("architectures", "bert"))
    check_long_texts(case)
    monkeypatch.setattr(transformers_folder, "_longest_input", lambda model: 100)
    with pytest.raises(CheckFailed, match=r"10,000 characters to 100 tokens, which the model does not accept"):
        check_long_texts(case)
