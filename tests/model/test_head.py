"""The head's losses, made piece by piece and without a search for the largest logit, against the plain definitions."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from speedrun.model import head
from speedrun.model.gpt import GPTConfig
from speedrun.model.head import cross_entropy_sum, logits_of, multi_token_sum, pieces

BASE = GPTConfig(vocab=61, layers=1, width=16, heads=2)
CAPS = {
    "none": BASE,
    "tanh": replace(BASE, softcap="tanh", softcap_limit=15.0),
    "sigmoid": replace(BASE, softcap="sigmoid", softcap_limit=30.0),
    "isru": replace(BASE, softcap="isru", softcap_limit=15.0),
    "beyond exp's range": replace(BASE, softcap="tanh", softcap_limit=1e4),
}


def features(*shape: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    x = (torch.randn(*shape, 16, generator=gen) * scale).requires_grad_()
    weight = torch.randn(61, 16, generator=gen).requires_grad_()
    targets = torch.randint(61, shape, generator=gen)
    targets[torch.rand(shape, generator=gen) < 0.3] = -1
    return x, weight, targets


@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["ordinary", "huge logits"])
@pytest.mark.parametrize("cap", CAPS)
def test_pieces_add_up_to_the_cross_entropy(cap: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, targets = features(37, scale=scale)
    plain = F.cross_entropy(logits_of(x, weight, CAPS[cap]), targets, ignore_index=-1, reduction="sum")
    expected = torch.autograd.grad(plain, (x, weight))
    monkeypatch.setattr(head, "CPU_BYTES", 61 * 4 * 5)  # five positions at a time
    assert pieces(37, 1, weight) == 8
    loss = cross_entropy_sum(x, weight, targets, CAPS[cap])
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-4)
    for found, wanted in zip(torch.autograd.grad(loss, (x, weight)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("cap", CAPS)
def test_several_tokens_ahead_are_weighted_cross_entropies(cap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, targets = features(5, 12)
    logits, weights = logits_of(x, weight, CAPS[cap]), (1.0, 0.5, 0.25)
    plain = torch.zeros(())
    for k, w in enumerate(weights):
        seen, wanted = logits[:, : 12 - k].flatten(0, 1), targets[:, k:].flatten()
        plain = plain + w * F.cross_entropy(seen, wanted, ignore_index=-1, reduction="sum")
    monkeypatch.setattr(head, "CPU_BYTES", 61 * 12 * 4 * 2)  # two rows at a time
    assert pieces(5, 12, weight) == 3
    loss = multi_token_sum(x, weight, targets, torch.tensor(weights), CAPS[cap], None)
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-4)


def test_a_small_head_is_one_piece_and_a_huge_one_stays_a_few() -> None:
    weight = torch.empty(4096, 1)
    assert pieces(16, 1, weight) == 1
    assert pieces(10**6, 1, weight) == head.MOST_PIECES
    assert pieces(2, 10**6, weight) == 2, "a row is never cut"
