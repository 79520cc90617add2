"""DeBERTa-v2's distances between positions are Transformers' own."""

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from terakoya.toolkit.architectures.disentangled import distance_buckets, scaled_size_sqrt


@pytest.mark.parametrize(("buckets", "largest"), [(8, 32), (32, 512), (256, 512), (3, 5)])
@pytest.mark.parametrize("length", [1, 7, 64, 300])
def test_distances_lie_in_the_buckets_of_transformers(length: int, buckets: int, largest: int) -> None:
    states, position = torch.empty(1, length, 4), torch.arange(length)
    expected = build_relative_position(states, states, bucket_size=buckets, max_position=largest)
    found = distance_buckets(position[:, None] - position, buckets, largest)
    assert found.dtype == torch.int64
    assert torch.equal(found[None], expected)


def test_scores_are_scaled_as_in_transformers() -> None:
    """To the bit: Transformers' function makes the number on the host, where a CUDA graph could not hold it."""
    for size in range(1, 300):
        for factor in (1, 2, 3):
            expected = torch.sqrt(torch.tensor(size, dtype=torch.float) * factor)
            found = scaled_size_sqrt(torch.empty(2, size, dtype=torch.bfloat16), factor)
            assert found.dtype == torch.float32 and torch.equal(found, expected)
