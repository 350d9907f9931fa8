"""Which parameter goes where."""

import copy
import re

import pytest
import torch
from torch import nn

from speedrun.model.gpt import GPT, GPTConfig
from speedrun.optim import Adam, Combined, Muon, NorMuon, route


class Odd(nn.Module):
    """Names that say nothing: shapes and module types have to."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(100, 8)
        self.conv = nn.Conv2d(3, 6, 3)
        self.mix = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(8))
        self.one = nn.Linear(8, 1, bias=False)
        self.z = nn.Linear(8, 100, bias=False)
        self.still = nn.Parameter(torch.ones(4, 4), requires_grad=False)


def places(model: nn.Module, **options) -> dict[str, str]:
    return {r.name: r.to for r in route(model, **options).routes}


def test_by_type_shape_and_name() -> None:
    assert places(Odd()) == {
        "a.weight": "adam",  # an embedding
        "conv.weight": "muon",
        "conv.bias": "adam",
        "mix.weight": "muon",
        "mix.bias": "adam",
        "gain": "adam",
        "one.weight": "adam",  # a single row
        "z.weight": "adam",  # as many rows as the embedding: it makes logits
        "still": "frozen",
    }


def test_our_own_model() -> None:
    model = GPT(GPTConfig(vocab_size=64, num_layers=1, dim=16, num_heads=2), context=8)
    plan = route(model)
    assert [name for name, _ in plan.muon[0]["params"]] == [
        "blocks.0.attention.qkv.weight", "blocks.0.attention.out.weight", "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
    ]  # fmt: skip
    assert {g["part"]: [n for n, _ in g["params"]] for g in plan.adam} == {"tables": ["embed"], "head": ["head"]}


def test_heads_of_attention_are_not_the_head() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32)
    with pytest.warns(UserWarning, match=r"If linear2.weight produces the outputs"):
        assert places(model)["self_attn.in_proj_weight"] == "muon"
    layer = nn.ModuleDict({"multihead": nn.Linear(4, 4, bias=False)})
    assert places(layer, override={"multihead.weight": "muon"}) == {"multihead.weight": "muon"}


def test_the_last_layer_of_a_sequential_is_its_output() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
    chosen = {r.name: (r.to, r.reason) for r in route(model).routes if r.name.endswith("weight")}
    assert chosen == {
        "0.weight": ("muon", "hidden matrix"),
        "2.0.weight": ("muon", "hidden matrix"),
        "2.2.weight": ("adam", "last layer of a Sequential"),
    }


def test_tied_weights_low_rank_factors_and_banks_say_so() -> None:
    model = Odd()
    model.z.weight = model.a.weight
    model.lora_A = nn.Linear(8, 2, bias=False)
    model.experts = nn.Parameter(torch.randn(4, 8, 16))
    plan = route(model)
    reasons = {r.name: (r.to, r.reason) for r in plan.routes}
    assert reasons["a.weight"] == ("adam", "embedding table, tied with z.weight")
    assert reasons["lora_A.weight"] == ("adam", "low-rank factor (LoRA)")
    assert reasons["experts"] == ("muon", "bank of 4 matrices, each orthogonalised by itself")
    before = model.experts.detach().clone()
    optimizer = Muon(plan.muon, lr=1.0, scale=None)
    model.experts.grad = torch.randn(4, 8, 16)
    optimizer.step()
    for change in before - model.experts.detach():  # each matrix is orthogonal, so the bank was not flattened
        assert torch.allclose(torch.linalg.svdvals(change), torch.ones(8), atol=0.15)


def test_a_pattern_overrides() -> None:
    chosen = places(Odd(), override={"conv.*": "adam", "z.weight": "muon", "mix.bias": "frozen"})
    assert (chosen["conv.weight"], chosen["z.weight"], chosen["mix.bias"]) == ("adam", "muon", "frozen")


def test_tied_weights_appear_once() -> None:
    model = Odd()
    model.z.weight = model.a.weight
    assert [r.name for r in route(model).routes].count("a.weight") == 1
    assert "z.weight" not in places(model)


def test_the_groups_are_ready_to_use() -> None:
    model = Odd()
    plan = route(model)
    optimizer = Combined(NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.001))
    trained = {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert trained == {id(p) for p in model.parameters() if p.requires_grad}
    assert "mix.weight" in optimizer.param_groups[0]["param_names"]


def test_the_table_can_be_read() -> None:
    text = str(route(Odd()))
    assert "muon    conv.weight  6x3x3x3  convolution kernel, flattened to (outputs, everything else)" in text
    assert "adam    a.weight     100x8    embedding table" in text
    assert "muon: 2 tensors, 226 parameters" in text


def test_nothing_for_muon_is_an_error_with_the_table() -> None:
    with pytest.raises(ValueError, match=r"(?s)No parameter is left for Muon.*0\.weight"):
        route(nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4)))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ({"nothing.*": "adam"}, r"override\['nothing.\*'\] matches no parameter"),
        ({"mix.*": "sgd"}, r"override\['mix.\*'\] is 'sgd'; it must be one of: muon, adam, frozen"),
        ({"gain": "muon"}, r"sends gain to Muon, but it has 1 dimensions"),
    ],
)
def test_mistaken_overrides_are_refused(override, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        route(Odd(), override=override)


@pytest.mark.parametrize("pattern", ["nothing.*", "a.weight", "gain"])
def test_blocks_of_what_muon_does_not_train_are_refused(pattern) -> None:
    said = (
        rf"blocks\['{re.escape(pattern)}'\] matches no parameter that Muon trains; their names are like 'conv.weight'"
    )
    with pytest.raises(ValueError, match=said):
        route(Odd(), blocks={pattern: 3})


def tiny_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 48, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def with_linear_layers(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for path, module in list(model.named_modules()):
        if type(module).__name__ == "Conv1D":
            linear = nn.Linear(*module.weight.shape)
            linear.weight.data.copy_(module.weight.T)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, linear)
    return model


@pytest.mark.parametrize("kind", [Muon, NorMuon])
@pytest.mark.parametrize("blocks", [{}, {"*.c_attn.weight": 3}, {"*.c_attn.weight": [40, 16, 16]}])
def test_gpt2_is_trained_as_if_its_layers_were_linear(kind, blocks) -> None:
    """Each of 50 updates, from the same weights and gradients: transformers' Conv1D stores inputs x outputs."""
    stored = tiny_gpt2()
    linear = with_linear_layers(stored)
    plans = [route(model, blocks=blocks) for model in (stored, linear)]
    assert [(r.name, r.to) for r in plans[0].routes] == [(r.name, r.to) for r in plans[1].routes]
    build = [Combined(kind(plan.muon, weight_decay=0.1), Adam(plan.adam)) for plan in plans]
    turned = {r.name for r in plans[0].routes if r.transposed}
    assert len(turned) == 8
    there = dict(linear.named_parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        before = {}
        for name, p in stored.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator)
            before[name] = p.detach().clone()
            there[name].data.copy_(p.T if name in turned else p)
            there[name].grad = (p.grad.T if name in turned else p.grad).contiguous()
        for optimizer in build:
            optimizer.step()
        for name, p in stored.named_parameters():
            start, other = before[name], there[name].detach()
            update = p.detach() - start
            expected = (other.T if name in turned else other) - start
            assert expected.norm() > 0
            assert (update - expected).norm() < 1e-4 * expected.norm()


def test_the_table_says_how_matrices_are_read() -> None:
    plan = route(tiny_gpt2(), blocks={"*.c_attn.weight": [24, 24, 24], "transformer.h.1.attn.c_attn*": 3})
    why = {r.name.removeprefix("transformer.h."): r.reason for r in plan.routes}
    assert why["0.mlp.c_fc.weight"] == "hidden matrix, stored transposed (Conv1D)"
    assert why["0.attn.c_attn.weight"] == "hidden matrix, stored transposed (Conv1D), blocks [24, 24, 24]"
    assert why["1.attn.c_attn.weight"] == "hidden matrix, stored transposed (Conv1D), blocks 3"
    assert "stored transposed (Conv1D), blocks 3\n" in str(plan)
    (group,) = plan.muon
    assert group["transposed"] == [True] * 8
    assert group["blocks"] == [[24, 24, 24], 1, 1, 1, (3, 1), 1, 1, 1]
    assert {"transposed", "blocks"}.isdisjoint(route(Odd()).muon[0])


def test_a_conv1d_that_makes_the_outputs_is_found_by_its_outputs() -> None:
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(nn.Embedding(32, 8), Conv1D(16, 8), Conv1D(32, 16))
    why = {r.name: (r.to, r.reason) for r in route(model).routes}
    assert why["2.weight"] == ("adam", "32 rows, as many as an embedding table")
    reasons = {r.name: r.reason for r in route(nn.Sequential(Conv1D(16, 8), Conv1D(3, 16))).routes}
    assert reasons["1.weight"] == "last layer of a Sequential"


class Experts(nn.Module):
    """As in transformers' GPT-OSS: experts x inputs x outputs."""

    is_transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8, 12))
        self.up_bias = nn.Parameter(torch.zeros(4, 12))
        self.router = nn.Linear(8, 4)


def test_transposed_banks_and_convolutions() -> None:
    model = nn.ModuleDict({"conv": nn.ConvTranspose2d(3, 6, 2), "experts": Experts(), "mix": nn.Linear(8, 8)})
    plan = route(model, override={"mix.weight": "muon"}, blocks={"experts.up": 2})
    found = {r.name: (r.to, r.reason, r.transposed) for r in plan.routes if r.parameter.ndim > 1}
    kernel = "convolution kernel, flattened to (outputs, everything else), stored transposed (ConvTranspose2d)"
    bank = "bank of 4 matrices, each orthogonalised by itself, stored transposed (Experts), blocks 2"
    assert found == {
        "conv.weight": ("muon", kernel, True),
        "experts.up": ("muon", bank, True),
        "experts.up_bias": ("adam", "a bias", False),
        "experts.router.weight": ("muon", "hidden matrix", False),
        "mix.weight": ("muon", "override 'mix.weight'", False),
    }
    optimizer = Muon(plan.muon, lr=1.0, scale=None, method="svd", momentum=0.0)
    before = model["experts"].up.detach().clone()
    model["experts"].up.grad = torch.randn(4, 8, 12)
    optimizer.step()
    for change in (before - model["experts"].up.detach()).mT:
        for half in change.split(6):  # outputs are rows: 6 of 12 in each block
            torch.testing.assert_close(torch.linalg.svdvals(half), torch.ones(6), atol=1e-4, rtol=0)


def test_torchs_own_convolutions_are_not_transposed() -> None:
    class Conv1D(nn.Conv1d):
        """Only the name is the same."""

    model = nn.Sequential(nn.Conv1d(4, 8, 3), Conv1D(8, 4, 3))
    assert places(model) == {"0.weight": "muon", "0.bias": "adam", "1.weight": "muon", "1.bias": "adam"}
