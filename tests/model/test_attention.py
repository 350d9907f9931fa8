"""Every way to compute attention against the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speedrun.model.attention import MIN_BLOCK, attend, attend_locally, reference_attend


def some(B: int, T: int, H: int, K: int, seed: int, grad: bool = False) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, H, K, generator=gen).requires_grad_(grad) for _ in range(3)]


def numbered(B: int, T: int, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (torch.rand(B, T, generator=gen) < 0.08).long().cumsum(1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 200), st.integers(0, 90), st.booleans(), st.sampled_from([None, 0.1]),
    st.integers(0, 999),
)  # fmt: skip
def test_attention_is_its_definition(B, T, window, packed, scale, seed) -> None:
    q, k, v = some(B, T, 2, 8, seed)
    documents = numbered(B, T, seed) if packed else None
    expected = reference_attend(q, k, v, documents_BT=documents, window=window, scale=scale)
    torch.testing.assert_close(attend(q, k, v, documents_BT=documents, window=window, scale=scale), expected)
    torch.testing.assert_close(attend_locally(q, k, v, documents_BT=documents, window=window, scale=scale), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_block_by_block_are_those_of_the_definition(packed) -> None:
    T, window = 3 * MIN_BLOCK + 5, 20
    documents = numbered(2, T, 1) if packed else None
    weights = torch.randn(2, T, 2, 8, generator=torch.Generator().manual_seed(9))
    grads = []
    for function in (attend, reference_attend):
        q, k, v = some(2, T, 2, 8, 5, grad=True)
        (function(q, k, v, documents_BT=documents, window=window) * weights).sum().backward()
        grads.append((q.grad, k.grad, v.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_window_of_one_sees_the_token_and_the_one_before() -> None:
    q, k, v = some(1, 100, 1, 4, 0)
    one = attend(q, k, v, window=1)
    v2 = v.clone()
    v2[:, 50] += 1
    changed = (attend(q, k, v2, window=1) - one).abs().sum((0, 2, 3)) > 1e-6
    assert changed.nonzero().flatten().tolist() == [50, 51]
