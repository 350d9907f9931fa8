"""Blocks of unequal height and matrices that are stored transposed: each as the plain matrices would be trained."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from speedrun.optim import Interleaved, Muon, NorMuon
from tests.distributed.ranks import together
from tests.optim.test_muon import OPTIONS

HEIGHTS = [32, 16, 8, 8, 16]
WIDTH = 12
EXTRA: dict[type[Muon], dict[str, Any]] = {Muon: {}, NorMuon: {"beta2": 0.9}}


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int, begin: int = 0) -> None:
    """Gradients are those of one tensor of 80 rows, cut as the parameters are."""
    for step in range(begin, begin + steps):
        whole = noise(sum(HEIGHTS), WIDTH, seed=100 + step)
        for p, g in zip(params, whole.split([p.shape[0] for p in params]), strict=True):
            p.grad = g.to(p.dtype).clone()
        optimizer.step()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([Muon, NorMuon]), OPTIONS, st.sampled_from([None, -1, -2]))
def test_blocks_of_unequal_height_are_trained_as_matrices_of_their_own(cls, options, axis) -> None:
    extra = {**EXTRA[cls], **({"axis": axis} if cls is NorMuon else {})}
    fused = nn.Parameter(noise(sum(HEIGHTS), WIDTH))
    apart = [nn.Parameter(x.clone()) for x in fused.detach().split(HEIGHTS)]
    train(cls([fused], blocks=HEIGHTS, **options, **extra), [fused], 3)
    train(cls(apart, **options, **extra), apart, 3)
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in apart]), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("cls", [Muon, NorMuon])
def test_other_matrices_of_the_group_do_not_disturb(cls) -> None:
    """Their blocks share stacks with some of the unequal ones, which then come before the first."""
    fused, small = nn.Parameter(noise(sum(HEIGHTS), WIDTH)), nn.Parameter(noise(8, WIDTH))
    alone = copy.deepcopy(fused)
    optimizer = cls([{"params": [small, fused], "blocks": [1, HEIGHTS]}])
    for step in range(3):
        small.grad = noise(8, WIDTH, seed=50 + step)
        train(optimizer, [fused], 1, step)
    train(cls([alone], blocks=HEIGHTS), [alone], 3)
    torch.testing.assert_close(fused, alone, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("cls", [Muon, NorMuon])
def test_a_saved_state_continues_and_its_size_was_known(cls, tmp_path: Path) -> None:
    fused = nn.Parameter(noise(sum(HEIGHTS), WIDTH, dtype=torch.bfloat16))
    optimizer = cls([("qkv", fused)], blocks=HEIGHTS, update_ema=0.2)
    train(optimizer, [fused], 2)
    held = sum(v.nbytes for v in optimizer.state[fused].values() if torch.is_tensor(v))
    assert optimizer.state_bytes() == {fused: held}
    torch.save([optimizer.state_dict(), fused], tmp_path / "saved.pt")
    state, again = torch.load(tmp_path / "saved.pt", weights_only=False)
    other = cls([("qkv", again)], blocks=HEIGHTS, update_ema=0.2)
    other.load_state_dict(state)
    train(optimizer, [fused], 2, 2)
    train(other, [again], 2, 2)
    assert torch.equal(optimizer.master(fused), other.master(again))
    assert optimizer.param_groups[0]["blocks"] == other.param_groups[0]["blocks"] == [HEIGHTS]


@pytest.mark.parametrize("cls", [Muon, NorMuon])
@pytest.mark.parametrize("blocks", [1, 4, (2, 3), HEIGHTS])
@pytest.mark.parametrize("matrix", ["flatten", "batch"])
def test_a_transposed_matrix_is_trained_as_its_transpose(cls, blocks, matrix) -> None:
    lead = (2,) if matrix == "batch" else ()
    plain = nn.Parameter(noise(*lead, sum(HEIGHTS), WIDTH))
    turned = nn.Parameter(plain.detach().mT.clone())
    given_blocks = [blocks] if isinstance(blocks, list) else blocks
    options = {"blocks": given_blocks, "matrix": matrix, "weight_decay": 0.1, "decay": "cautious", "update_ema": 0.1}
    a, b = cls([plain], **options), cls([turned], transposed=True, **options)
    for step in range(4):
        plain.grad = noise(*plain.shape, seed=100 + step)
        turned.grad = plain.grad.mT.contiguous()
        a.step()
        b.step()
        torch.testing.assert_close(turned.detach().mT, plain.detach(), atol=1e-12, rtol=1e-12)
    assert b.state[turned]["momentum_buffer"].shape == turned.shape


def test_without_being_told_the_update_of_a_transposed_matrix_has_the_wrong_size() -> None:
    """What docs/optimizers.md says of Muon([conv1d.weight])."""
    sizes = {}
    for shape in ((16, 64), (64, 16)):
        for told in (False, True):
            p = nn.Parameter(torch.zeros(shape))
            p.grad = noise(*shape, dtype=torch.float32)
            Muon([p], lr=1.0, transposed=told).step()
            sizes[shape, told] = p.norm().item()
    assert sizes[(16, 64), False] / sizes[(16, 64), True] == pytest.approx(0.5, rel=0.01)
    assert sizes[(64, 16), False] / sizes[(64, 16), True] == pytest.approx(2, rel=0.01)


def test_a_transposed_convolution_is_flattened_to_outputs_and_everything_else() -> None:
    weight = noise(3, 6, 2, 2)  # inputs, outputs, height, width
    turned, plain = nn.Parameter(weight.clone()), nn.Parameter(weight.transpose(0, 1).reshape(6, 12).clone())
    a, b = Muon([turned], transposed=True, blocks=[2, 4]), Muon([plain], blocks=[2, 4])
    for step in range(3):
        turned.grad = noise(3, 6, 2, 2, seed=step)
        plain.grad = turned.grad.transpose(0, 1).reshape(6, 12).clone()
        a.step()
        b.step()
    torch.testing.assert_close(turned.detach().transpose(0, 1).reshape(6, 12), plain.detach())


# ------------------------------------------------------------------------------------------ several processes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Parameter(torch.randn(20, 6))
        self.turned = nn.Parameter(torch.randn(6, 20))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.qkv.T).tanh().square().mean() + (x @ self.turned).tanh().square().mean()


def groups(net: Net) -> list[dict[str, Any]]:
    named = [(name, p) for name, p in net.named_parameters()]
    return [{"params": named, "blocks": [[10, 5, 5], [10, 5, 5]], "transposed": [False, True]}]


def optimize(net: Net, optimizer: Any) -> dict[str, Tensor]:
    for step in range(4):
        net(noise(8, 6, seed=step, dtype=torch.float32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for n, p in net.named_parameters()}


def shared(rank: int, size: int, cls: type[Muon], kind: str) -> dict[str, Tensor]:
    net = Net()
    if kind == "fsdp":
        fully_shard(net)
        return optimize(net, cls(groups(net), weight_decay=0.1, decay_by="lr-squared"))
    optimizer = Interleaved(net, [cls(groups(net), weight_decay=0.1, decay_by="lr-squared")])
    found = optimize(net, optimizer)
    full = optimizer.full_state_dict()
    if dist.get_rank() == 0 and cls is NorMuon:  # (10, 6): one number a row; (5, 6): one a column
        assert [s["second_moment"].shape for s in full.values()] == [(22,), (22,)]
    return found


@pytest.mark.parametrize("cls", [Muon, NorMuon])
@pytest.mark.parametrize("kind", ["fsdp", "interleaved"])
def test_several_ranks_train_what_one_process_would(cls, kind: str, tmp_path: Path) -> None:
    net = Net()
    expected = optimize(net, cls(groups(net), weight_decay=0.1, decay_by="lr-squared"))
    for found in together(tmp_path, 3, shared, cls, kind):
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        (
            [32, 16],
            "blocks is [32, 16], which does not divide the 64 x 8 matrix of w; give the number of blocks in its",
        ),
        ([32, 32, 0], "heights that add up to 64 as a list"),
        ([80, -16], "blocks is [80, -16], which does not divide"),
        ((2, 2, 2), "blocks is (2, 2, 2), which does not divide"),
        ("3", "blocks is '3', which does not divide"),
        (2.0, "blocks is 2.0, which does not divide"),
        ([[32, 16, 8]], "blocks is [32, 16, 8], which does not divide"),
        (None, "blocks is None, which does not divide"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(blocks, sentence) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Muon([("w", nn.Parameter(torch.ones(64, 8)))], blocks=blocks)


def test_a_list_that_could_be_read_in_two_ways_is_refused() -> None:
    """Three layers must not be read otherwise than four."""
    layers = [nn.Parameter(torch.ones(64, 8)) for _ in range(4)]
    assert Muon(layers, blocks=[32, 16, 16]).param_groups[0]["blocks"] == [[32, 16, 16]] * 4
    said = r"Give \[\[32, 16, 16\]\] \* 3 for heights, or \[\(32, 1\), \(16, 1\), \(16, 1\)\] for numbers"
    with pytest.raises(ValueError, match=said):
        Muon(layers[:3], blocks=[32, 16, 16])
    Muon(layers[:3], blocks=[[32, 16, 16]] * 3)
    Muon(layers[:3], blocks=[(32, 1), (16, 1), (16, 1)])
    Muon(layers[:3], blocks=[32, 16, 8])  # numbers: they do not add up to the rows


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"transposed": 1}, "transposed is 1; it must be True or False"),
        ({"transposed": [True, True]}, "transposed lists 2 values for 1 parameters"),
    ],
)
def test_transposed_takes_true_or_false(options, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        Muon([nn.Parameter(torch.ones(4, 8))], **options)


def test_an_empty_matrix_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Muon cannot train w: its shape \(0, 8\) has no weights; leave it out"):
        Muon([("w", nn.Parameter(torch.ones(0, 8)))])
