"""The head's losses, made piece by piece and without a search for the largest logit, against the plain definitions."""

import pytest
import torch
import torch.nn.functional as F

from speedrun.model import head
from speedrun.model.config import HeadConfig
from speedrun.model.head import logits_of, loss_sum, piece_rows, targets_ahead

CAPS = {
    "none": HeadConfig(),
    "tanh": HeadConfig(softcap="tanh", softcap_limit=15.0),
    "sigmoid": HeadConfig(softcap="sigmoid", softcap_limit=30.0),
    "isru": HeadConfig(softcap="isru", softcap_limit=15.0),
    "beyond exp's range": HeadConfig(softcap="tanh", softcap_limit=1e4),
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
    x, weight, targets = features(80, scale=scale)
    plain = F.cross_entropy(logits_of(x, weight, CAPS[cap]), targets, ignore_index=-1, reduction="sum")
    expected = torch.autograd.grad(plain, (x, weight))
    monkeypatch.setattr(head, "CPU_BYTES", 61 * 4 * 32)
    assert piece_rows(80, weight) == 32, "two whole pieces and a half"
    loss = loss_sum(x, weight, targets[None], None, CAPS[cap])
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
    monkeypatch.setattr(head, "CPU_BYTES", 61 * 4 * 16)
    assert piece_rows(60, weight) == 16, "a piece may end in the middle of a row"
    loss = loss_sum(x.flatten(0, 1), weight, targets_ahead(targets, 3), torch.tensor(weights), CAPS[cap])
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-4)


def test_targets_ahead_stay_in_their_row_and_document() -> None:
    targets = torch.tensor([[5, 6, 7, 8], [1, -1, 2, 3]])
    documents = torch.tensor([[0, 0, 1, 1], [2, 2, 2, 2]])
    assert targets_ahead(targets, 3).tolist() == [
        [5, 6, 7, 8, 1, -1, 2, 3],
        [6, 7, 8, -1, -1, 2, 3, -1],
        [7, 8, -1, -1, 2, 3, -1, -1],
    ]
    assert targets_ahead(targets, 2, documents)[1].tolist() == [6, -1, 8, -1, -1, 2, 3, -1]


def test_the_form_for_gpus_is_the_same_loss_with_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing every number of the vocabulary with the target instead of gathering it."""
    x, weight, targets = features(6, 8)
    ahead, weights = targets_ahead(targets, 3), torch.tensor([1.0, 0.5, 0.25])
    found = []
    for form in (head.gathered, head.compared):
        monkeypatch.setattr(head, "chosen", form)
        loss = loss_sum(x.flatten(0, 1), weight, ahead, weights, CAPS["sigmoid"])
        found.append((loss, *torch.autograd.grad(loss, (x, weight))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rows", [16, 1000, 10**6, 393_216])
def test_pieces_are_few_and_multiples_of_16(rows: int) -> None:
    size = piece_rows(rows, torch.empty(4096, 1))
    assert size % 16 == 0
    assert 1 <= -(-rows // size) <= head.MOST_PIECES
    assert size >= min(rows, head.CPU_BYTES // (4 * 4096) // 2)
