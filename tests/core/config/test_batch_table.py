"""Rows by node rank or host name, for the nodes that came up; a table that does not fit is answered with one."""

import json
import re
from pathlib import Path

import pytest
import toy
from command_line import call
from hypothesis import given
from hypothesis import strategies as st

from terakoya.config import batch_table
from terakoya.config.batch_table import split_proportionally
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya_schemas.parameters import json_schema

ORIGINAL = [{"0": 100, "1": 100, "2": 56}, {"0": 80, "1": 80, "2": 48, "3": 48}]


def rows(table: dict[str, int], *hosts: str, redistribute: bool = False, ranks: list[int] | None = None) -> list[int]:
    nodes = dict(zip(ranks or range(len(hosts)), hosts, strict=True))
    found = batch_table.assign_rows(table, nodes, there=f"{len(hosts)} nodes", redistribute=redistribute)
    assert list(found) == sorted(nodes)
    return list(found.values())


@pytest.mark.parametrize("table", ORIGINAL)
def test_names_give_hosts_what_ranks_give_nodes(table: dict[str, int]) -> None:
    hosts = [f"a{rank}" for rank in range(len(table))]
    by_name = dict(zip(reversed(hosts), reversed(table.values()), strict=True))
    batch_table.check_table(by_name)
    assert rows(table, *hosts) == rows(by_name, *hosts) == list(table.values())


def test_a_domain_more_or_less_does_not_matter_unless_two_hosts_differ_by_it() -> None:
    assert rows({"a01": 3, "a02.lab": 5}, "a02", "a01.lab") == [5, 3]
    with pytest.raises(UserError, match=r"the hosts a01\.x, a02, but"):
        rows({"a01.x": 3, "a02": 5}, "a01.y", "a02")


@pytest.mark.parametrize(
    ("table", "hosts", "mended"),
    [
        ({"a01": 100, "a02": 56}, ("a01", "a03"), '{"a01": 100, "a03": 56}'),
        ({"a01": 7, "a02": 5, "a03": 4}, ("a03", "a01"), '{"a03": 6, "a01": 10}'),
        ({"a01": 8, "a02": 8}, ("a01", "a02", "b"), '{"a01": 6, "a02": 5, "b": 5}'),
        ({"-1": 16}, ("a", "b"), '{"0": 8, "1": 8}'),
        ({"0": 100, "1": 100, "2": 56}, ("a",), '{"-1": 256}'),
    ],
)
def test_hosts_the_table_does_not_know_are_answered_with_a_table(
    table: dict[str, int], hosts: tuple[str, ...], mended: str
) -> None:
    with pytest.raises(UserError) as refused:
        rows(table, *hosts)
    assert str(refused.value).endswith(f"keeps the global batch of {sum(table.values())}: {mended}")


def test_one_host_with_two_nodes_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="are on one host"):
        rows({"a01": 3, "a02": 5}, "a01", "a01")


def test_who_is_left_shares_what_all_had() -> None:
    assert rows({"0": 7, "1": 5, "2": 4}, "a", "c", ranks=[0, 2], redistribute=True) == [10, 6]
    assert rows({"a": 100, "b": 100, "c": 56}, "c", "a", redistribute=True) == [92, 164]
    assert rows({"0": 7, "1": 5, "2": 4}, "b", ranks=[1], redistribute=True) == [16]
    assert rows({"0": 7, "1": 5, "2": 4}, "a", "b", "c", redistribute=True) == [7, 5, 4]


def test_redistributing_adds_no_node_and_stopping_takes_none_away() -> None:
    with pytest.raises(UserError, match="the table is for 2 nodes"):
        rows({"0": 8, "1": 8}, "a", "b", "c", redistribute=True)
    with pytest.raises(UserError, match=r"node ranks should be 0 to 1, got \[0, 2\]"):
        rows({"0": 7, "1": 5, "2": 4}, "a", "c", ranks=[0, 2])


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(0, 500))
def test_parts_are_whole_and_none_is_empty(weights: list[int], more: int) -> None:
    total = len(weights) + more
    parts = split_proportionally(weights, total)
    assert sum(parts) == total and min(parts) >= 1
    wanted = [weight * total / sum(weights) for weight in weights]
    if min(wanted) >= 1:
        assert all(abs(part - want) < 1 for part, want in zip(parts, wanted, strict=True))
    assert split_proportionally(weights, sum(weights)) == weights


def test_parameters_and_their_schema_take_names(tmp_path: Path) -> None:
    raw = toy.parameters(tmp_path, batch_size={"a01": 100, "a02": 56}, on_lost_node="redistribute")
    assert Parameters.from_dict(raw, source="x.json").batch_size == {"a01": 100, "a02": 56}
    with pytest.raises(UserError, match=r'for example \{"a01": 1, "a02": 56\}'):
        Parameters.from_dict({**raw, "batch_size": {"a01": 0, "a02": 56}}, source="x.json")
    with pytest.raises(UserError, match=r'got \{"a01": 1, "1": 2\}; for example \{"0": 1, "1": 2\}'):
        Parameters.from_dict({**raw, "batch_size": {"a01": 1, "1": 2}}, source="x.json")
    (pattern,) = json_schema(registry())["properties"]["batch_size"]["patternProperties"]
    assert all(re.search(pattern, key) for key in ("-1", "0", "12", "a01", "gpu-3.lab", "10.0.0.3"))
    assert not any(re.search(pattern, key) for key in ("-2", "01", "", "a b", "a-"))


def short_form(store: Path, **changes: object) -> dict[str, object]:
    return toy.parameters(store, **{"batch_size": {"*": 8}, **changes})


@pytest.mark.parametrize(("nodes", "table"), [(1, {"-1": 8}), (2, {"0": 8, "1": 8}), (3, {"0": 8, "1": 8, "2": 8})])
def test_the_short_form_is_an_entry_for_each_node(store: Path, nodes: int, table: dict[str, int]) -> None:
    phases = [{"steps": 3, "batch_size": {"*": 4}}, {}]
    loaded = Parameters.from_dict(short_form(store, phases=phases), source="run.json", nodes=nodes)
    assert loaded.batch_size == table
    assert loaded.phases[0].batch_size == dict.fromkeys(table, 4)
    assert loaded.of_phases[1].batch_size == table


def test_the_short_form_needs_the_number_of_nodes_unless_it_is_only_shown(store: Path) -> None:
    with pytest.raises(UserError, match=r'^run\.json: batch_size: \{"\*": 8\} is the rows of each node.*add --nodes N'):
        Parameters.from_dict(short_form(store), source="run.json")
    assert Parameters.from_dict(short_form(store), source="run.json", nodes="any").batch_size == {"*": 8}


def test_a_number_of_nodes_agrees_with_an_explicit_table(store: Path) -> None:
    raw = short_form(store, batch_size={"0": 8, "1": 8})
    for nodes, assumed in ((2, None), (None, None), (None, 3), (2, 3)):
        loaded = Parameters.from_dict(raw, source="run.json", nodes=nodes, assumed_nodes=assumed)
        assert loaded.batch_size == raw["batch_size"]
    with pytest.raises(UserError, match=r"^--nodes 3: batch_size is for 2 nodes: .*leave --nodes out"):
        Parameters.from_dict(raw, source="run.json", nodes=3)
    assumed_alone = Parameters.from_dict(short_form(store), source="run.json", assumed_nodes=1)
    assert assumed_alone.batch_size == {"-1": 8}
    with pytest.raises(ValueError, match="batch_size: expected"):
        batch_table.check_table({"*": 8, "0": 8})


def test_the_table_is_shown_as_it_stands_or_for_a_number_of_nodes(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(short_form(store)))
    for nodes, table in (([], {"*": 8}), (["--nodes", "2"], {"0": 8, "1": 8})):
        _, out, _ = call(capsys, "parameters", "show", file, "--json", *nodes)
        assert json.loads(out)["batch_size"] == table
