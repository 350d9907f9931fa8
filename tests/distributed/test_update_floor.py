"""The u/w floor needs the norms of whole blocks: on ranks that own matrices, and where FSDP2 has cut them."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from speedrun.optim import Adam, Combined, Interleaved, NorMuon
from tests.distributed.ranks import together

STEPS = 4


def build() -> nn.Sequential:
    """Large weights, of which the second matrix is two blocks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 14, bias=False), nn.Tanh(), nn.Linear(14, 3))
    with torch.no_grad():
        net[2].weight[:7] *= 50
    return net


def members(net: nn.Sequential, floor: float = 0.35) -> list[NorMuon | Adam]:
    matrices = {"params": [("2", net[2].weight), ("4", net[4].weight)], "blocks": [2, 1]}
    rest = [("0", net[0].weight), ("0.bias", net[0].bias), ("4.bias", net[4].bias)]
    return [NorMuon([matrices], lr=0.02, update_floor=floor), Adam(rest, lr=0.01, eps=1e-3)]


def train(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every rank sees the same rows, so the averaged gradients are those of one process."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        F.mse_loss(net(torch.randn(8, 6, generator=generator)), torch.ones(8, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in net.parameters()]


def in_ranks(rank: int, size: int, kind: str) -> list[Tensor]:
    net = build()
    if kind == "interleaved":
        return train(net, Interleaved(net, members(net), average="mean"))
    for layer in (net[0], net[2], net[4]):
        fully_shard(layer)
    fully_shard(net)
    return train(net, Combined(*members(net)))


@pytest.mark.parametrize("kind", ["interleaved", "fsdp"])
def test_two_ranks_train_what_one_process_would(kind: str, tmp_path: Path) -> None:
    net, usual = build(), build()
    expected = train(net, Combined(*members(net)))
    without = train(usual, Combined(*members(usual, floor=0.0)))
    assert not torch.allclose(expected[2][:7], without[2][:7], rtol=1e-3), "or the floor does nothing here"
    for rank in together(tmp_path, 2, in_ranks, kind):
        for found, weight in zip(rank, expected, strict=True):
            torch.testing.assert_close(found, weight, rtol=1e-5, atol=1e-5)
