"""The table `batch_size`: the rows of each optimizer step for each node, by its rank or its host's name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from terakoya.errors import UserError
from terakoya.json_settings import short_json

ONLY_NODE = "-1"
"""The key of a table for a single node."""
EACH_NODE = "*"
"""The key of the short form of a table, for equal nodes; the number of nodes comes from the command line."""
NAME = re.compile(r"(?!\d+$)[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")


def check_table(table: Mapping[str, int]) -> None:
    """Raises ValueError, with a corrected table, unless `table` is for one node, in the short form for equal nodes, or
    has a positive entry for each of the node ranks 0 ... n - 1, or for hosts by name."""
    ranks = {str(rank) for rank in range(len(table))}
    keys = set(table)
    known = keys in ({ONLY_NODE}, {EACH_NODE}, ranks) or has_host_names(table)
    if table and known and all(rows > 0 for rows in table.values()):
        return
    rows = [max(1, value) for value in table.values()] or [256]
    names = list(table) if has_host_names(table) else [str(rank) for rank in range(len(rows))]
    if len(rows) == 1 and not has_host_names(table):
        names = [ONLY_NODE]
    corrected = dict(zip(names, rows, strict=True))
    raise ValueError(
        'batch_size: expected {"-1": ROWS} for one node, {"*": ROWS} for equal nodes, or one entry of at least 1 row '
        'for each node rank "0", "1", ... or for each host by its name; '
        f"got {short_json(dict(table))}; for example {json.dumps(corrected)}"
    )


def for_nodes(raw: Mapping[str, Any], nodes: int | None, *, source: str) -> dict[str, Any]:
    """Returns the parameters `raw` with an entry for each of `nodes` nodes in place of each table in the short form,
    also of those in its lists. Errors name `source` as the file of `raw`. Raises UserError if a table is in the short
    form and `nodes` is None."""
    result, table = dict(raw), raw.get("batch_size")
    if isinstance(table, Mapping) and set(table) == {EACH_NODE}:
        result["batch_size"] = _one_entry_a_node(table, nodes, source)
    for key, entries in raw.items():
        if isinstance(entries, list):
            result[key] = [
                for_nodes(each, nodes, source=source) if isinstance(each, Mapping) else each for each in entries
            ]
    return result


def _one_entry_a_node(table: Mapping[str, Any], nodes: int | None, source: str) -> dict[str, Any]:
    rows = table[EACH_NODE]
    if nodes is None:
        raise UserError(
            f"{source}: batch_size: {short_json(dict(table))} is the rows of each node, but the number of nodes "
            "is not given: add --nodes N, or write an entry for each node"
        )
    return {ONLY_NODE: rows} if nodes == 1 else {str(rank): rows for rank in range(nodes)}


def check_nodes(table: Mapping[str, int], nodes: int) -> None:
    """Raises UserError unless `table`, which is not in the short form, is for `nodes` nodes."""
    if nodes != len(table):
        raise UserError(
            f"--nodes {nodes}: batch_size is for {_describe(table)}: {short_json(dict(table))}; leave --nodes out, or "
            'give {"*": ROWS}, the rows of each node'
        )


def has_host_names(table: Mapping[str, int]) -> bool:
    """Returns whether the keys of `table` are names of hosts."""
    return bool(table) and all(NAME.fullmatch(key) for key in table)


def node_names(table: Mapping[str, int]) -> list[str]:
    """Returns a name for each node of `table`, by node rank: the keys where these are names of hosts."""
    return list(table) if has_host_names(table) else [f"node {rank}" for rank in range(len(table))]


def assign_rows(
    table: Mapping[str, int], nodes: Mapping[int, str], *, there: str, redistribute: bool = False
) -> dict[int, int]:
    """Returns node rank -> rows for `nodes`, node rank -> host. The sum of rows is that of the table. Raises UserError
    if the table does not fit the nodes; the message contains a table that does.

    With `redistribute`, fewer nodes than the table has entries share all its rows, in proportion to their own rows; a
    node without an entry is still an error. `there` describes the nodes in errors.
    """
    nodes = dict(sorted(nodes.items()))
    if not redistribute and list(nodes) != list(range(len(nodes))):
        raise UserError(
            f"node ranks should be 0 to {len(nodes) - 1}, got {list(nodes)}; give each node its --node-rank"
        )
    entries = {node: _entry(table, node, host) for node, host in nodes.items()}
    known = [entry for entry in entries.values() if entry is not None]
    fits = len(known) == len(nodes) and len(set(known)) == len(known)
    if fits and (redistribute or len(known) == len(table)):
        rows = split_proportionally([table[entry] for entry in known], sum(table.values()))
        return dict(zip(nodes, rows, strict=True))
    if has_host_names(table) and len(set(nodes.values())) < len(nodes):
        raise UserError(f"batch_size: names hosts, but two of {there} are on one host; give the rows of each node rank")
    total = sum(table.values())
    raise UserError(
        f"batch_size: the table is for {_describe(table)}, but the run has {there}; a table that keeps the global "
        f"batch of {total}: {json.dumps(_fitting(table, nodes, entries))}"
    )


def split_proportionally(weights: Sequence[int], total: int) -> list[int]:
    """Splits `total` into whole parts of at least 1, as nearly proportional to the positive `weights` as possible. The
    parts are `weights` themselves where their sum is `total`."""
    assert total >= len(weights)
    spare = total - len(weights)  # the remainder after each part has 1
    wanted = [max(0, weight * total - sum(weights)) for weight in weights]  # (part - 1) x the sum of the weights
    scale = sum(wanted) or 1
    parts = [1 + each * spare // scale for each in wanted]
    by_remainder = sorted(range(len(parts)), key=lambda index: (-(wanted[index] * spare % scale), index))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts


def _entry(table: Mapping[str, int], node: int, host: str) -> str | None:
    """Returns the key of `table` for the node; host names match with or without their domain."""
    if set(table) == {ONLY_NODE}:
        return ONLY_NODE
    if not has_host_names(table):
        return str(node) if str(node) in table else None
    if host in table:
        return host
    short = [key for key in table if key.partition(".")[0] == host.partition(".")[0]]
    one_has_no_domain = len(short) == 1 and ("." not in short[0] or "." not in host)
    return short[0] if one_has_no_domain else None


def _describe(table: Mapping[str, int]) -> str:
    if has_host_names(table):
        return f"the host{'s' if len(table) > 1 else ''} {', '.join(table)}"
    return f"{len(table)} node{'s' if len(table) > 1 else ''}"


def _fitting(table: Mapping[str, int], nodes: Mapping[int, str], entries: Mapping[int, str | None]) -> dict[str, int]:
    """Returns a table for `nodes` with the same sum. With names, known hosts keep their rows, and new hosts take those
    of missing ones."""
    total = sum(table.values())
    if not has_host_names(table):
        share, rest = divmod(total, len(nodes))
        if len(nodes) == 1:
            return {ONLY_NODE: total}
        return {str(rank): share + (rank < rest) for rank in range(len(nodes))}
    missing = [rows for name, rows in table.items() if name not in entries.values()]
    mean = max(1, total // len(table))
    weights = {}
    for node, host in nodes.items():
        entry = entries[node]
        weights[host] = table[entry] if entry is not None else missing.pop(0) if missing else mean
    if total < len(weights):
        return dict.fromkeys(weights, 1)
    return dict(zip(weights, split_proportionally(list(weights.values()), total), strict=True))
