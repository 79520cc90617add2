"""The architecture `example` keeps its promises, and has the size it should have."""

from pathlib import Path

from terakoya import contract, plugins
from terakoya.contract.toy import VOCABULARY

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def test_it_keeps_what_an_architecture_promises() -> None:
    assert contract.problems(PLUGIN) == []


def test_it_has_as_many_layers_as_asked() -> None:
    architecture = plugins.load([str(PLUGIN)]).component("architectures", "example")(num_hidden_layers=3)
    assert len(architecture.blocks(architecture.build(VOCABULARY, "masked"))) == 3
