"""What every optimizer offers a trainer, under the same names."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedrun.optim import Adam, Combined, Interleaved, Muon, NorMuon, Snoo
from speedrun.optim.protocol import TrainerOptimizer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(6, 4, generator=gen)) for _ in range(2))
        self.c = nn.Parameter(torch.randn(6, 4, generator=gen).bfloat16())


def give(net: Net, seed: int = 1) -> None:
    gen = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=gen).to(p.dtype)


def split(net: Net) -> list[Any]:
    return [NorMuon([("a", net.a), ("c", net.c)]), Adam([("b", net.b)])]


KINDS = {
    "adam": lambda net: Adam(net.named_parameters()),
    "muon": lambda net: Muon(net.named_parameters()),
    "normuon": lambda net: NorMuon(net.named_parameters()),
    "combined": lambda net: Combined(*split(net)),
    "interleaved": lambda net: Interleaved(net, split(net)),
    "snoo": lambda net: Snoo(Combined(*split(net)), k=2),
    "snoo of interleaved": lambda net: Snoo(Interleaved(net, split(net)), k=2),
    "snoo of another package's": lambda net: Snoo(torch.optim.SGD([("a", net.a), ("b", net.b), ("c", net.c)], lr=0.1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_them_have_it(kind: str) -> None:
    net = Net()
    optimizer: TrainerOptimizer = KINDS[kind](net)
    assert isinstance(optimizer, TrainerOptimizer)
    give(net)
    with optimizer.no_sync():
        pass
    assert optimizer.agree([1.5, 2.0]) == [1.5, 2.0]
    norm = torch.stack([p.grad.float().norm() for p in net.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(optimizer.clip_grad_norm_(0.5).float(), norm, rtol=1e-3, atol=0)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.copy_state(net.a, net.c)  # `c` is an exact bfloat16 weight, whose master is set below
    value: Tensor = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    optimizer.set_master(net.c, value)
    exact = "another" not in kind
    assert torch.equal(optimizer.master(net.c), value if exact else value.bfloat16())
    states, masters = optimizer.full_state_dict(), [optimizer.master(p) for p in net.parameters()]

    other = Net()
    again: TrainerOptimizer = KINDS[kind](other)
    with torch.no_grad():
        for p, q in zip(other.parameters(), net.parameters(), strict=True):
            p.copy_(q)
    again.load_full_state_dict(states)
    assert all(map(torch.equal, masters, map(again.master, other.parameters())))
    if exact:
        assert sum(again.state_bytes().values()) > 0
    else:
        with pytest.raises(ValueError, match="SGD does not say how large its state gets"):
            again.state_bytes()
    again.reset()
    assert not {key for state in again.full_state_dict().values() for key in state} - {"outer"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "snoo" not in kind])
def test_clipping_to_nothing_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"max_norm is 0.0; it must be positive"):
        KINDS[kind](Net()).clip_grad_norm_(0.0)


def test_hooks_and_schedulers_of_a_member_see_its_steps() -> None:
    net = Net()
    matrices, rest = split(net)
    seen = []
    rest.register_step_pre_hook(lambda *_: seen.append("before"))
    rest.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer = Combined(Combined(matrices, rest))
    scheduler = torch.optim.lr_scheduler.LambdaLR(rest, lambda step: 0.5**step)
    give(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns if it steps before its optimizer
        optimizer.step()
        scheduler.step()
    assert seen == ["before", "after"]


def test_a_member_checks_for_itself_after_a_refused_step() -> None:
    """What was found for one step is not kept for the next."""
    net = Net()
    matrices, rest = split(net)
    optimizer = Combined(matrices, rest)
    give(net)
    assert net.b.grad is not None
    net.b.grad[0, 0] = float("nan")
    with pytest.raises(ValueError, match="The gradient of b is not finite"):
        optimizer.step()
    assert matrices.checked is None
    assert rest.checked is None
    with pytest.raises(ValueError, match="The gradient of b is not finite"):
        rest.step()
