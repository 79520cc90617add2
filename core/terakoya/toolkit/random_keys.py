"""Keys and counter-based hashes: every random decision about data is a pure function of a key, never of a generator.

The hash is a chain of steps of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014): `state = mix(state + (part + 1) * GOLDEN)`, starting at 0. Its values never change: tests/golden/keys.json.

Letters: B rows, n any number.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import overload

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_ALL = (1 << 64) - 1

Part = int | str


@lru_cache(maxsize=1024)
def name_u64(name: str) -> int:
    """Returns the number of `name` as a part of a hash: the first 8 bytes of its BLAKE2b, little-endian."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@overload
def hash_u64(*parts: Part) -> int: ...


@overload
def hash_u64(*parts: Part | np.ndarray) -> np.ndarray | int: ...


def hash_u64(*parts: Part | np.ndarray) -> np.ndarray | int:
    """Returns the hash of `parts` in this order: integers (modulo 2**64), strings, and arrays of integers that
    broadcast.

    Returns an int where no part is an array, else a uint64 array of the broadcast shape. Arrays have at least one
    dimension. `hash_u64(a, b, array)[i] == hash_u64(a, b, int(array[i]))`.
    """
    state: int | np.ndarray = 0
    for part in parts:
        if isinstance(part, np.ndarray):
            assert part.ndim > 0, "arrays have at least one dimension: numpy scalars warn when they overflow"
            step = part.astype(np.uint64)
            step += np.uint64(1)
            step *= np.uint64(GOLDEN)
            state = _mix(step + (np.uint64(state) if isinstance(state, int) else state))
            continue
        number = name_u64(part) if isinstance(part, str) else int(part)
        number = (number + 1) * GOLDEN & _ALL
        state = _mix_int(state + number & _ALL) if isinstance(state, int) else _mix(state + np.uint64(number))
    return state


def torch_seed(*parts: Part) -> int:
    """Returns `hash_u64(*parts)` without its highest bit: a seed for torch's generators."""
    return hash_u64(*parts) & _ALL >> 1


def row_keys(seed: int, epoch: int, store: Part, rows: np.ndarray) -> np.ndarray:
    """Returns the keys (n,) uint64 of the plan rows `rows` (n,) of `store`, a number or name, in `epoch`."""
    keys = hash_u64(seed, epoch, store, rows)
    assert isinstance(keys, np.ndarray)
    return keys


def streams(keys: np.ndarray, purpose: str) -> np.ndarray:
    """Returns one stream of random numbers for each key: (B,) uint64 of keys (B,) uint64. `numbers` reads it.

    A stream continues the key's hash: for a row's key it is `hash_u64(seed, epoch, store, row, purpose)`.
    """
    return _mix(keys + np.uint64((name_u64(purpose) + 1) * GOLDEN & _ALL))


def numbers(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns the random numbers, uint64, at `positions` of `streams`; the two broadcast together."""
    step = positions.astype(np.uint64)
    step += np.uint64(1)
    step *= np.uint64(GOLDEN)
    if step.shape != streams.shape:
        return _mix(step + streams)
    step += streams
    return _mix(step)


def draws(keys: np.ndarray, purpose: str, positions: np.ndarray) -> np.ndarray:
    """Returns uniform uint64; keys and positions broadcast together. With a row's key they are
    `hash_u64(seed, epoch, store, row, purpose, position)`.

    `purpose` names the decision ("mask", ...), so that no two decisions share random numbers.
    """
    return numbers(streams(keys, purpose), positions)


def integers_below(draws: np.ndarray, limit: int | np.ndarray) -> np.ndarray:
    """Returns integers in [0, limit), int64, from uint64 `draws`; `limit` (an int or an array that broadcasts) is in
    [1, 2**32). Uses the upper 32 bits of the draws."""
    return ((draws >> np.uint64(32)) * np.asarray(limit, np.uint64) >> np.uint64(32)).astype(np.int64)


def bernoulli(draws: np.ndarray, probability: float) -> np.ndarray:
    """Returns True, bool, with `probability`, for each of uint64 `draws`."""
    if probability >= 1:
        return np.ones(draws.shape, dtype=bool)
    return draws < np.uint64(int(max(probability, 0.0) * 2.0**64))


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Returns the images of `index` (any shape, values in [0, n)) under the permutation of range(n) named by `key`,
    int64.

    The permutation is a Feistel network over the smallest near-square rectangle of at least n cells; an image outside
    [0, n) is permuted again until it is inside. O(1) memory and time for each position; n is below 2**64.
    """
    assert n > 0, "a permutation needs elements"
    rows = int(np.ceil(np.sqrt(n)))
    columns = -(-n // rows)
    round_keys = _round_keys(key, 6 if n >= 256 else 16)  # small halves mix slowly
    flat = np.ravel(index).astype(np.uint64)
    assert not len(flat) or int(flat.max()) < n, f"an index outside [0, {n})"
    flat = _feistel(flat, rows, columns, round_keys)
    outside = np.flatnonzero(flat >= np.uint64(n))
    while len(outside):
        walked = _feistel(flat[outside], rows, columns, round_keys)
        flat[outside] = walked
        outside = outside[walked >= np.uint64(n)]
    return flat.astype(np.int64).reshape(np.shape(index))


@lru_cache(maxsize=64)
def _round_keys(key: int, rounds: int) -> tuple[np.uint64, ...]:
    """Returns the keys of the rounds of the permutation named by `key`."""
    return tuple(np.uint64(hash_u64(key, "permute", number)) for number in range(rounds))


def _feistel(flat: np.ndarray, rows: int, columns: int, round_keys: tuple[np.uint64, ...]) -> np.ndarray:
    """Applies a bijection of [0, rows * columns): each half is shifted in turn by a hash of the other."""
    halves = [flat // np.uint64(columns), flat % np.uint64(columns)]
    limits = [np.uint64(rows), np.uint64(columns)]
    for number, key in enumerate(round_keys):
        shifted, other = number % 2, 1 - number % 2
        shift = halves[other] * np.uint64(GOLDEN)
        shift += key
        shift ^= shift >> np.uint64(29)
        shift *= np.uint64(_FIRST)
        shift >>= np.uint64(32)
        shift *= limits[shifted]
        shift >>= np.uint64(32)
        shift += halves[shifted]
        shift %= limits[shifted]
        halves[shifted] = shift
    return halves[0] * limits[1] + halves[1]


def _mix(state: np.ndarray) -> np.ndarray:
    """Applies splitmix64's finaliser in place."""
    scratch = state >> np.uint64(30)
    state ^= scratch
    state *= np.uint64(_FIRST)
    np.right_shift(state, np.uint64(27), out=scratch)
    state ^= scratch
    state *= np.uint64(_SECOND)
    np.right_shift(state, np.uint64(31), out=scratch)
    state ^= scratch
    return state


def _mix_int(state: int) -> int:
    """Returns splitmix64's finaliser of one number."""
    state = (state ^ state >> 30) * _FIRST & _ALL
    state = (state ^ state >> 27) * _SECOND & _ALL
    return state ^ state >> 31
