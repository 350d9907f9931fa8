"""Which parameter goes where."""

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
    return {r.name: r.place for r in route(model, **options).routes}


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
    model = GPT(GPTConfig(vocab=64, layers=1, width=16, heads=2), context=8)
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
    chosen = {r.name: (r.place, r.reason) for r in route(model).routes if r.name.endswith("weight")}
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
    reasons = {r.name: (r.place, r.reason) for r in plan.routes}
    assert reasons["a.weight"] == ("adam", "embedding table, tied with z.weight")
    assert reasons["lora_A.weight"] == ("adam", "low-rank factor (LoRA)")
    assert reasons["experts"] == ("muon", "bank of 4 matrices, each orthogonalised by itself")
    before = model.experts.detach().clone()
    optimizer = Muon(plan.muon, lr=1.0, scale="none")
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


def tiny_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2Model(transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2))


def test_weights_that_are_stored_transposed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^h\.0\.attn\.c_attn is a Conv1D of transformers") as e:
        route(tiny_gpt2())
    assert "Replace it by an nn.Linear with the transposed weight" in str(e.value)
    assert 'override={"*c_attn.weight": "adam"}' in str(e.value)
    others = {"h.*.attn.*": "adam", "h.*.mlp.c_proj.weight": "frozen"}
    with pytest.raises(ValueError, match=r"^h\.0\.mlp\.c_fc is a Conv1D"):
        route(tiny_gpt2(), override=others)
    with pytest.raises(ValueError, match=r"^h\.0\.mlp\.c_fc is a Conv1D"):  # not even if asked for
        route(tiny_gpt2(), override={**others, "h.*.mlp.c_fc.weight": "muon"})
    with pytest.raises(ValueError, match=r"^The model is a Conv1D"):
        route(tiny_gpt2().h[0].mlp.c_fc)


def test_the_ways_out_for_transposed_weights() -> None:
    model = tiny_gpt2()
    chosen = places(model, override={"h.*.attn.*": "adam", "h.*.mlp.c_proj.weight": "adam", "h.*.c_fc.weight": "frozen",
                                     "wpe.weight": "muon"})  # fmt: skip
    assert chosen["h.1.mlp.c_proj.weight"] == "adam"
    for path, module in list(model.named_modules()):
        if type(module).__name__ == "Conv1D":
            inputs, outputs = module.weight.shape
            linear = nn.Linear(inputs, outputs)
            linear.weight.data.copy_(module.weight.T)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, linear)
    assert places(model)["h.1.mlp.c_proj.weight"] == "muon"


def test_torchs_own_convolutions_are_not_transposed() -> None:
    class Conv1D(nn.Conv1d):
        """Only the name is the same."""

    model = nn.Sequential(nn.Conv1d(4, 8, 3), Conv1D(8, 4, 3))
    assert places(model) == {"0.weight": "muon", "0.bias": "adam", "1.weight": "muon", "1.bias": "adam"}
