"""The model against its definition: shapes, counts, causality, attention, initialisation."""

import math

import pytest
import torch
import torch.nn.functional as F

from speedrun.errors import UserError
from speedrun.model.attention import attend, reference_attend
from speedrun.model.config import EmbeddingConfig, HeadConfig, InitConfig
from speedrun.model.embeddings import lookup
from speedrun.model.gpt import GPT, GPTConfig, count_parameters, flops_per_token
from speedrun.model.head import loss_sum
from speedrun.model.rotary import frequencies, rotary_tables, rotate
from speedrun.recipes import get_recipe
from speedrun.training.config import with_fields

SMALL = GPTConfig(vocab_size=64, num_layers=2, dim=32, num_heads=2)


def lively(config: GPTConfig, context: int = 32) -> GPT:
    """A model whose every weight does something (projections do not start at zero)."""
    torch.manual_seed(0)
    model = GPT(config, context)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return model


def ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_the_native_gpt2_form_has_123_53_million_parameters() -> None:
    config = get_recipe("gpt2", "short").model
    assert round(sum(count_parameters(config).values()) / 1e6, 2) == 123.53
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(config, 8).parameters()) == sum(count_parameters(config).values())


@pytest.mark.parametrize("tied", [True, False])
def test_counted_parameters_are_the_real_ones(tied: bool) -> None:
    config = GPTConfig(vocab_size=50, num_layers=3, dim=24, num_heads=2, mlp_ratio=2.5, head=HeadConfig(tied=tied))
    assert sum(p.numel() for p in GPT(config, 8).parameters()) == sum(count_parameters(config).values())


def test_flops_are_six_per_weight_and_token_plus_attention() -> None:
    weights = sum(count_parameters(SMALL).values()) - 64 * 32  # the embedding is a lookup
    assert flops_per_token(SMALL, 0) == 6 * weights
    assert flops_per_token(SMALL, 100) - flops_per_token(SMALL, 0) == 6 * 2 * 32 * 100


def test_a_fresh_model_predicts_all_tokens_alike() -> None:
    x = ids(2, 16)
    loss = GPT(SMALL, 16)(x, x) / x.numel()
    assert loss.item() == pytest.approx(math.log(64), abs=1e-5)


def test_the_loss_is_a_sum_over_counted_targets() -> None:
    model, x, y = lively(SMALL), ids(3, 8), ids(3, 8, seed=1)
    rows = sum(model(x[i : i + 1], y[i : i + 1]).item() for i in range(3))
    assert model(x, y).item() == pytest.approx(rows, rel=1e-5)
    partly = y.clone()
    partly[1:] = -1
    assert model(x, partly).item() == pytest.approx(model(x[:1], y[:1]).item(), rel=1e-5)


@pytest.mark.parametrize("form", [SMALL, get_recipe("gpt2", "pocket").model])
def test_nothing_looks_ahead(form: GPTConfig) -> None:
    model = lively(GPTConfig(**{**form.__dict__, "vocab_size": 64, "dim": 32, "num_heads": 2}))
    x = ids(1, 12)
    changed = x.clone()
    changed[0, 8] = (x[0, 8] + 1) % 64
    before, after = model.features(x), model.features(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_attention_is_its_definition_with_and_without_documents() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 10, 3, 8, generator=generator) for _ in range(3))
    torch.testing.assert_close(attend(q, k, v), reference_attend(q, k, v))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 3], [0] * 10])
    packed = attend(q, k, v, doc_ids_BT=documents)
    torch.testing.assert_close(packed, reference_attend(q, k, v, doc_ids_BT=documents))
    torch.testing.assert_close(packed[:1, 3:7], attend(q[:1, 3:7], k[:1, 3:7], v[:1, 3:7]))


def test_the_head_loss_is_softmax_cross_entropy_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 16, generator=generator) for n in (7, 50))
    targets = torch.tensor([3, -1, 49, 0, 7, -1, 8])
    logp = (x.double() @ w.double().t()).log_softmax(-1)
    expected = -sum(logp[i, t] for i, t in enumerate(targets) if t >= 0)
    assert loss_sum(x, w, targets[None], None, SMALL.head).item() == pytest.approx(float(expected), rel=1e-6)
    assert loss_sum(x.bfloat16(), w, targets[None], None, SMALL.head).dtype == torch.float32


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    cos, sin = rotary_tables(20, frequencies(8, 10_000.0))
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 8, generator=generator) for _ in range(2))

    def at(x: torch.Tensor, t: int) -> torch.Tensor:
        return rotate(x, cos[t : t + 1], sin[t : t + 1]).flatten()

    assert at(q, 13).norm() == pytest.approx(q.norm().item(), rel=1e-6)
    assert (at(q, 9) @ at(k, 4)).item() == pytest.approx((at(q, 17) @ at(k, 12)).item(), rel=1e-5)
    assert (at(q, 9) @ at(k, 4)).item() != pytest.approx((at(q, 9) @ at(k, 5)).item(), rel=1e-5)


def test_rotation_pairs_a_channel_with_the_one_half_a_head_further() -> None:
    cos, sin = rotary_tables(2, frequencies(4, 10_000.0))
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    turned = rotate(x, cos[1:], sin[1:]).flatten()
    torch.testing.assert_close(turned, torch.tensor([math.cos(1), 0.0, -math.sin(1), 0.0]))


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "gelu"},
        {"attention.qk_norm": False},
        {"embeddings.norm": True},
        {"head.tied": True},
        {"attention.rotary_base": 500.0},
        {"attention.residual_scale": "depth"},
    ],
)
def test_every_switch_acts(change: dict[str, object]) -> None:
    x = ids(2, 16)
    plain, changed = lively(SMALL), lively(with_fields(SMALL, change))
    assert abs(plain(x, x).item() - changed(x, x).item()) > 1e-4


def test_initial_values_are_those_of_the_config() -> None:
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            vocab_size=512,
            num_layers=1,
            dim=64,
            num_heads=2,
            embeddings=EmbeddingConfig(std=0.3),
            init=InitConfig(scale=0.5),
        ),
        8,
    )
    assert model.embed.std().item() == pytest.approx(0.3, rel=0.02)
    assert model.blocks[0].attention.qkv.weight.abs().max().item() == pytest.approx(0.5 / 8, rel=0.01)
    assert not model.blocks[0].mlp.down.weight.any()
    plain = GPT(get_recipe("gpt2", "pocket").model, 8)
    assert plain.embed.abs().max().item() == pytest.approx(1 / math.sqrt(192), rel=0.01)
    assert plain.blocks[0].mlp.down.weight.any()
    assert plain.head is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 5}, "model.dim 192 does not split into 5 heads"),
        ({"num_layers": 0}, "model.num_layers is 0"),
        ({"mlp_ratio": 0.0}, "mlp_ratio is 0.0"),
        ({"attention.rotary_base": 1.0}, "model.attention.rotary_base is 1.0"),
        ({"embeddings.std": -1.0}, "model.embeddings.std is -1.0; it must be above 0 or None"),
        ({"embeddings.std": math.inf}, "model.embeddings.std is inf; it must be finite"),
        ({"num_layers": 1.5}, "model.num_layers is 1.5; it must be a whole number"),
    ],
)
def test_impossible_shapes_are_refused_with_a_way_out(change: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        with_fields(GPTConfig(), change)


def test_bf16_activations_stay_close_to_float32() -> None:
    model, x = lively(SMALL), ids(2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(x, x).item()
    assert rough == pytest.approx(model(x, x).item(), rel=0.02)
    assert F.rms_norm(torch.ones(4), (4,)).dtype == torch.float32


def test_lookup_is_an_embedding_forward_and_backward() -> None:
    table = torch.randn(20, 6, requires_grad=True)
    x = torch.tensor([[1, 1, 5], [19, 0, 1]])
    gradient = torch.randn(2, 3, 6)
    (lookup(table, x) * gradient).sum().backward()
    mine, table.grad = table.grad, None
    (F.embedding(x, table) * gradient).sum().backward()
    torch.testing.assert_close(mine, table.grad)
    torch.library.opcheck(lookup, (table.detach().requires_grad_(), x))


@pytest.mark.parametrize("tied", [True, False])
def test_compiled_gradients_have_the_same_bits_every_time_with_two_threads(tied: bool) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = lively(GPTConfig(vocab_size=512, num_layers=1, dim=64, num_heads=2, head=HeadConfig(tied=tied)), 64)
        loss = torch.compile(model, dynamic=False, fullgraph=True)
        x = torch.randint(3, (8, 64), generator=torch.Generator().manual_seed(0))  # every row is used many times
        seen = []
        for _ in range(10):
            loss(x, x.roll(-1, 1)).backward()
            seen.append({name: p.grad for name, p in model.named_parameters()})
            model.zero_grad(set_to_none=True)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(seen[0][name], other[name]) for other in seen for name in other)
