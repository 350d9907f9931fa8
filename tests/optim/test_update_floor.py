"""The u/w floor: updates of at least a share of a weight's norm. tests/optim/test_muon.py has it too."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from speedrun.model.gpt import GPT, GPTConfig
from speedrun.optim import Adam, Combined, Muon, NorMuon, functional
from speedrun.optim.exact_bf16 import split
from speedrun.training.optimizers import MuonPart, OptimConfig, build_optimizer
from tests.optim.test_muon import gradients, parameters

FLOOR = 0.35


def test_it_is_the_formula_in_float64() -> None:
    """Matrices whose update is too small, large enough, and nothing at all."""
    gen = torch.Generator().manual_seed(0)
    u, w = (torch.randn(3, 5, 4, generator=gen, dtype=torch.float64) for _ in range(2))
    u[0] *= 1e-3
    u[2] = 0
    found = functional.raise_to_floor(u, w, FLOOR)
    torch.testing.assert_close(found[0], u[0] / u[0].norm() * FLOOR * w[0].norm(), rtol=1e-12, atol=0)
    assert torch.equal(found[1], u[1])
    assert torch.equal(found[2], u[2])


@pytest.mark.parametrize("kind", [Muon, NorMuon])
@pytest.mark.parametrize("scale", [None, "spectral", "match-rms-adamw"])
def test_large_weights_get_larger_steps_and_small_ones_the_usual(kind: type[Muon], scale: Any) -> None:
    """Each block of a fused matrix by itself: the first is large."""
    with torch.no_grad():
        params = parameters([(24, 8), (8, 8)], dtype=torch.float64)
        params[0][:8] *= 100
        params[0][8:] *= 1e-3
    plain, before = copy.deepcopy(params), params[0].detach().clone()
    for own, floor in ((params, FLOOR), (plain, 0.0)):
        optimizer = kind([{"params": own, "blocks": [3, 1]}], lr=0.01, scale=scale, update_floor=floor)
        for p, g in zip(own, gradients(own, 0), strict=True):
            p.grad = g
        optimizer.step()
    moved = before - params[0].detach()
    assert (moved[:8].norm() / before[:8].norm()).item() == pytest.approx(0.01 * FLOOR)
    torch.testing.assert_close(params[0][8:], plain[0][8:], rtol=1e-12, atol=0)


def test_with_exact_bf16_it_reads_the_master() -> None:
    """The bits of the same steps on float32 weights."""
    exact = [nn.Parameter(p.detach() * 20) for p in parameters([(12, 6)], dtype=torch.bfloat16)]
    master = [nn.Parameter(p.detach().float()) for p in exact]
    a, b = (NorMuon(params, lr=0.003, update_floor=FLOOR) for params in (exact, master))
    for step in range(20):
        for p, m, g in zip(exact, master, gradients(exact, step), strict=True):
            p.grad, m.grad = g, g.float()
        a.step()
        b.step()
    for p, m in zip(exact, master, strict=True):
        assert torch.equal(a.master(p), m.detach())
        assert torch.equal(p.detach(), split(m.detach())[0])


def test_a_state_dict_goes_on_with_the_same_bits() -> None:
    def made(params: list[nn.Parameter]) -> Combined:
        return Combined(NorMuon(params[:1], lr=0.02, update_floor=FLOOR), Adam(params[1:], lr=0.01))

    straight = parameters([(8, 6), (6,)])
    optimizer = made(straight)
    for step in range(4):
        if step == 2:
            resumed, saved = copy.deepcopy(straight), copy.deepcopy(optimizer.state_dict())
        for p, g in zip(straight, gradients(straight, step), strict=True):
            p.grad = g
        optimizer.step()
    assert saved["param_groups"][0]["update_floor"] == FLOOR
    again = made(resumed)
    again.load_state_dict(saved)
    for step in (2, 3):
        for p, g in zip(resumed, gradients(resumed, step), strict=True):
            p.grad = g
        again.step()
    assert all(map(torch.equal, straight, resumed))


def test_a_recipe_chooses_it() -> None:
    model = GPT(GPTConfig(vocab_size=64, num_layers=1, dim=16, num_heads=2), 8)
    config = OptimConfig(matrices="normuon", muon=MuonPart(update_floor=FLOOR))
    optimizer = build_optimizer(model.named_parameters(), model.param_roles(), config)
    assert [g["update_floor"] for g in optimizer.param_groups if g["part"] == "blocks"] == [FLOOR]
