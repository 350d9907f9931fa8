"""Every switch of the model: it acts, it stays inside a document, and its formula is the one described."""

import math

import pytest
import torch
import torch.nn.functional as F

from speedrun.errors import UserError
from speedrun.model.config import EmbeddingConfig, HeadConfig, ResidualConfig
from speedrun.model.gpt import GPT, Documents, GPTConfig, Windows, count_parameters
from speedrun.model.head import describe_fp8, fp8_linear, loss_sum, softcap, targets_ahead
from speedrun.model.rotary import frequencies, rotary_tables, yarn
from speedrun.recipes.medium_before import VALUE_LAYERS
from speedrun.training.config import fields_of, with_fields

BASE = GPTConfig(vocab_size=61, num_layers=4, dim=32, num_heads=2, gate_inputs=6, norm_eps=1e-6)
WINDOWS = Windows(4, 8)
# Everything at once: what the later records are made of.
FULL = with_fields(
    BASE,
    {
        "head.tied": True, "head.untie": True, "embeddings.norm": True, "attention.rotary": "half",
        "attention.rotary_base": 1024.0, "attention.yarn": True, "attention.scale": 0.1,
        "attention.long_layers": (0, 3), "no_attention": (2,), "attention.gates": True, "attention.lambdas": True,
        "attention.key_offset": True, "embeddings.value_layers": ((0, 0), (1, 1), (3, 0)),
        "embeddings.value_std": 0.3, "embeddings.value_gates": True, "head.softcap": "sigmoid",
        "head.softcap_limit": 23.0, "head.softcap_shift": 5.0, "embeddings.smear": True, "head.smear_mtp": True,
        "residual.lambdas": 1.1, "residual.x0_lambdas": True, "embeddings.second": True,
        "residual.skips": ((0, 2), (1, 3)), "residual.skip_gates": True, "residual.backout": 1,
        "embeddings.bigram_vocab_size": 40, "embeddings.bigram_dim": 24,
    },
)  # fmt: skip

SWITCHES = {
    "activation": ({"activation": "gelu"}, BASE),
    "qk_norm": ({"attention.qk_norm": False}, BASE),
    "attention_norm": ({"attention.norm": False}, BASE),
    "value_norm": ({"attention.value_norm": True}, BASE),
    "attention_scale": ({"attention.scale": 0.1}, BASE),
    "attention_residual": ({"attention.residual_scale": "depth"}, BASE),
    "rotary": ({"attention.rotary": "half"}, BASE),
    "rotary_base": ({"attention.rotary_base": 50.0}, BASE),
    "long_layers": ({"attention.long_layers": (1,)}, BASE),
    "no_attention": ({"no_attention": (1,)}, BASE),
    "no_mlp": ({"no_mlp": (1,)}, BASE),
    "attention_gates": ({"attention.gates": True}, BASE),
    "attention_lambdas": ({"attention.lambdas": True}, BASE),
    "key_offset": (
        {"attention.key_offset": True},
        with_fields(BASE, {"attention.rotary": "half", "attention.long_layers": (1,)}),
    ),
    "tied": ({"head.tied": True}, BASE),
    "embed_norm": ({"embeddings.norm": True}, BASE),
    "embed_std": ({"embeddings.std": 0.5}, BASE),
    "second_embedding": ({"embeddings.second": True}, with_fields(BASE, {"residual.x0_lambdas": True})),
    "value_tables": ({"embeddings.value_layers": ((1, 0),)}, BASE),
    "value_std": ({"embeddings.value_std": 0.5}, with_fields(BASE, {"embeddings.value_layers": ((1, 0),)})),
    "value_gates": (
        {"embeddings.value_gates": True},
        with_fields(BASE, {"embeddings.value_layers": ((1, 0),), "embeddings.value_std": 1.0}),
    ),
    "value_lambdas": ({"embeddings.value_lambdas": True}, BASE),
    "bigram_rows": ({"embeddings.bigram_vocab_size": 300}, BASE),
    "bigram_width": ({"embeddings.bigram_dim": 8}, with_fields(BASE, {"embeddings.bigram_vocab_size": 300})),
    "softcap tanh": ({"head.softcap": "tanh"}, BASE),
    "softcap sigmoid": ({"head.softcap": "sigmoid"}, BASE),
    "softcap isru": ({"head.softcap": "isru"}, BASE),
    "fp8_head": ({"head.fp8": True}, with_fields(BASE, {"vocab_size": 64})),
    "smear": ({"embeddings.smear": True}, BASE),
    "smear_mtp": ({"head.smear_mtp": True}, BASE),
    "residual_lambdas": ({"residual.lambdas": 1.1}, BASE),
    "x0_lambdas": ({"residual.x0_lambdas": True}, BASE),
    "skips": ({"residual.skips": ((0, 2),)}, BASE),
    "skip_form": ({"residual.skip_form": "linear"}, with_fields(BASE, {"residual.skips": ((0, 2),)})),
    "skip_gates": (
        {"residual.skip_gates": True},
        with_fields(BASE, {"residual.skips": ((0, 2),), "embeddings.norm": True}),
    ),
    "backout": ({"residual.backout": 1}, BASE),
    "backout_form": ({"residual.backout_form": "mix"}, with_fields(BASE, {"residual.backout": 1})),
    "zero_init": ({"init.zero_init": False}, BASE),
    "init_scale": ({"init.scale": 2.0}, BASE),
    "mlp_init_scale": ({"init.mlp_scale": 0.5}, BASE),
}


def ids(B: int, T: int, seed: int = 0, vocab: int = 61) -> torch.Tensor:
    return torch.randint(vocab, (B, T), generator=torch.Generator().manual_seed(seed))


def lively(config: GPTConfig, context: int = 64) -> GPT:
    """All weights random: what starts at zero would hide mistakes."""
    torch.manual_seed(0)
    model = GPT(config, context)
    gen = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=gen) * (0.3 if p.ndim > 1 else 0.7))
    return model


def losses(config: GPTConfig, steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    model = GPT(config, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    found = []
    for step in range(steps):
        x = ids(2, 17, step)
        loss = model(x[:, :-1], x[:, 1:], windows=WINDOWS) / 32
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_changes_the_loss_within_five_steps(name: str) -> None:
    changes, base = SWITCHES[name]
    off, on = losses(base), losses(with_fields(base, changes))
    assert all(map(math.isfinite, on))
    assert any(abs(a - b) > 2e-5 for a, b in zip(off, on, strict=True)), f"{off} and {on}"


def test_every_switch_is_in_the_list() -> None:
    """`untie`, `yarn` and `across_documents` are tested below; numbers that belong to a switch go with it."""
    tested = {key for changes, _ in SWITCHES.values() for key in changes} | {"head.untie", "attention.yarn"}
    belongs = {"vocab_size", "num_layers", "dim", "num_heads", "mlp_ratio", "norm_eps", "gate_inputs",
               "head.fp8_scales", "head.softcap_limit", "head.softcap_shift", "head.softcap_temperature"}  # fmt: skip
    assert set(fields_of(BASE)) == tested | belongs | {"across_documents"}


def test_nothing_crosses_a_document_boundary() -> None:
    """Each document in a packed row has the features and losses it has alone."""
    x = ids(1, 41)
    x, y = x[:, :-1], x[:, 1:]
    documents = torch.tensor([[0] * 13 + [1] * 3 + [2] * 24])
    model = lively(FULL)
    packed = model.features(x, Documents(documents), WINDOWS)
    for number, (begin, end) in enumerate([(0, 13), (13, 16), (16, 40)]):
        alone = model.features(x[:, begin:end], windows=WINDOWS)
        torch.testing.assert_close(packed[:, begin:end], alone, atol=2e-4, rtol=1e-3), number
    total = sum(
        model(x[:, a:b], y[:, a:b], windows=WINDOWS, mtp_weights_M=torch.tensor([1.0, 0.5, 0.25])).item()
        for a, b in [(0, 13), (13, 16), (16, 40)]
    )
    both = model(x, y, Documents(documents), windows=WINDOWS, mtp_weights_M=torch.tensor([1.0, 0.5, 0.25])).item()
    assert both == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize(
    "part", ["embeddings.smear", "head.smear_mtp", "attention.key_offset", "mtp_tokens", "embeddings.bigram_vocab_size"]
)
def test_across_documents_lets_it(part: str) -> None:
    """What the records did, by a flag: the first token of a document then feels the last of the one before."""
    changes = {} if part == "mtp_tokens" else {part: 40 if part.endswith("vocab_size") else True}
    config = with_fields(BASE, {"attention.rotary": "half", "attention.long_layers": (0, 1, 2, 3), **changes})
    predict = torch.tensor([1.0, 0.5, 0.25]) if part == "mtp_tokens" else None
    x = ids(1, 21)
    documents = Documents(torch.tensor([[0] * 10 + [1] * 10]))
    inside, across = (lively(with_fields(config, {"across_documents": flag})) for flag in (False, True))
    a = inside(x[:, :-1], x[:, 1:], documents, windows=WINDOWS, mtp_weights_M=predict).item()
    b = across(x[:, :-1], x[:, 1:], documents, windows=WINDOWS, mtp_weights_M=predict).item()
    assert abs(a - b) > 5e-5


def test_nothing_looks_ahead_with_everything_on() -> None:
    model = lively(FULL)
    x = ids(1, 20)
    changed = x.clone()
    changed[0, 12] = (x[0, 12] + 1) % 61
    before, after = model.features(x, windows=WINDOWS), model.features(changed, windows=WINDOWS)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_windows_bound_what_a_layer_sees() -> None:
    one = with_fields(BASE, {"num_layers": 1})
    x = ids(1, 30)
    changed = x.clone()
    changed[0, 10] = (x[0, 10] + 1) % 61
    for long_layers, reach in (((), 4), ((0,), 8)):
        model = lively(with_fields(one, {"attention.long_layers": long_layers}))
        gap = (model.features(x, windows=WINDOWS) - model.features(changed, windows=WINDOWS)).abs().sum(-1)[0] > 1e-6
        assert gap.nonzero().flatten().tolist() == list(range(10, 10 + reach + 1))


def test_the_split_starts_as_a_copy_and_then_goes_its_own_way() -> None:
    model = lively(with_fields(BASE, {"head.tied": True, "head.untie": True}))
    x = ids(2, 12)
    tied = model(x, x.roll(-1, 1), tied=True)
    model.untie_head()
    torch.testing.assert_close(model(x, x.roll(-1, 1), tied=False), tied)
    model(x, x.roll(-1, 1), tied=False).backward()
    assert model.head is not None
    assert not torch.allclose(model.head.grad, model.embed.grad)  # type: ignore[arg-type]
    fresh = lively(with_fields(BASE, {"head.tied": True, "head.untie": True}))
    fresh(x, x.roll(-1, 1), tied=True).backward()
    assert fresh.head is not None
    assert fresh.head.grad is None, "before the split the second table is not touched"


def test_yarn_stretches_slow_frequencies_and_sharpens_the_scores() -> None:
    """Windows of 3, 7, 11, 13 blocks of 128: the scales of the record."""
    start = frequencies(128, 1024.0, "half")
    assert (start[0].item(), start[31].item(), start[32:].abs().max().item()) == (1.0, pytest.approx(1 / 1024), 0.0)
    scales = [0.1 * yarn(start, tuple(128 * b for b in (3, 7, 11, 13)[:n]))[1] for n in (1, 2, 3, 4)]
    assert scales == pytest.approx([0.1, 0.116946, 0.127518, 0.131778], abs=1e-6)
    after, _ = yarn(start, (3 * 128, 7 * 128))
    assert after[0] == start[0], "a frequency that turns often within the window stays"
    assert after[31].item() == pytest.approx(start[31].item() * 3 / 7), "one that does not turn once is slowed"
    model = lively(with_fields(FULL, {"attention.yarn": True}))
    x = ids(1, 20)
    plain = model.features(x, windows=WINDOWS)
    model.apply_yarn((4, 8))
    stretched_once = model.features(x, windows=WINDOWS)
    assert not torch.allclose(plain, stretched_once)
    model.apply_yarn((4,))
    torch.testing.assert_close(model.features(x, windows=WINDOWS), plain)


def test_half_rotary_leaves_half_of_the_pairs_alone() -> None:
    cos, _ = rotary_tables(10, frequencies(16, 1024.0, "half"))
    assert torch.equal(cos[:, 0, 4:], torch.ones(10, 4))


@pytest.mark.parametrize(
    ("config", "z", "value"),
    [
        (HeadConfig(softcap="tanh", softcap_limit=15.0), 30.0, 15 * math.tanh(2)),
        (HeadConfig(softcap="sigmoid", softcap_limit=23.0, softcap_shift=5.0), 2.5, 23 / (1 + math.exp(-1))),
        (HeadConfig(softcap="isru", softcap_limit=15.0), 20.0, 15 * 20 / 25),
        (HeadConfig(), 99.0, 99.0),
    ],
)
def test_soft_caps(config: HeadConfig, z: float, value: float) -> None:
    assert softcap(torch.tensor(z), config).item() == pytest.approx(value, rel=1e-6)


def test_multi_token_prediction_is_a_weighted_sum_of_shifted_losses() -> None:
    gen = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 7, 8, generator=gen), torch.randn(13, 8, generator=gen)
    targets = torch.randint(13, (2, 7), generator=gen)
    targets[1, 3] = -1
    weights = torch.tensor([1.0, 0.5, 0.25])
    expected = 0.0
    for k, weight in enumerate(weights):
        for b in range(2):
            for t in range(7 - k):
                if targets[b, t + k] >= 0:
                    expected += float(weight * F.cross_entropy((w @ x[b, t])[None], targets[b, t + k : t + k + 1]))
    found = loss_sum(x.flatten(0, 1), w, targets_ahead(targets, 3), weights, BASE.head)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_the_fp8_product_is_the_float32_one_within_its_three_bits() -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(32, 64, generator=gen).requires_grad_()
    w = (torch.randn(48, 64, generator=gen) * 0.1).requires_grad_()
    g = torch.randn(32, 48, generator=gen) * 0.01
    scales = (4 / 448, 0.5 / 448, 0.05 / 448)
    out = fp8_linear(x, w, *scales)
    out.backward(g.to(out.dtype))
    ours = out.float(), x.grad.clone(), w.grad.clone()  # type: ignore[union-attr]
    x.grad = w.grad = None
    exact = F.linear(x, w)
    exact.backward(g)
    for found, expected, limit in zip(ours, (exact, x.grad, w.grad), (0.05, 0.08, 0.08), strict=True):
        assert expected is not None
        assert found.shape == expected.shape
        assert (found - expected).norm() < limit * expected.norm()
        assert not torch.equal(found, expected)


def test_without_8_bit_units_the_head_says_what_it_does_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    what, why = describe_fp8(torch.device("cpu"))
    assert "multiplied in wider ones instead" in what
    assert why == "the cpu has no units for 8-bit products"
    assert describe_fp8(torch.device("mps"))[1] == "torch has no 8-bit floats on mps"
    for capability, units in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert (describe_fp8(torch.device("cuda"))[0] == "8-bit floats") == units


def test_parameter_counts_of_the_records() -> None:
    """Large tables and matrices: 268.66 M for the short record, 613.4 M for the medium one."""
    short = GPTConfig(
        vocab_size=50304, num_layers=11, dim=768, num_heads=6, no_attention=(6,),
        head=HeadConfig(tied=True, untie=True),
        embeddings=EmbeddingConfig(value_layers=((0, 1), (1, 2), (8, 0), (9, 1), (10, 2))),
    )  # fmt: skip
    medium = GPTConfig(
        vocab_size=50304, num_layers=16, dim=1024, num_heads=8, head=HeadConfig(tied=True, untie=True),
        embeddings=EmbeddingConfig(second=True, value_layers=VALUE_LAYERS), residual=ResidualConfig(x0_lambdas=True),
    )  # fmt: skip
    assert sum(count_parameters(short).values()) / 1e6 == pytest.approx(268.66, abs=0.01)
    assert sum(count_parameters(medium).values()) / 1e6 == pytest.approx(613.4, abs=0.1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"attention.long_layers": (4,)},
            "model.attention.long_layers names layer 4, but the model has 4 layers, 0 to 3",
        ),
        ({"no_attention": (-1,)}, "model.no_attention names layer -1"),
        ({"residual.skips": ((2, 2),)}, "a skip must lead to a later layer"),
        ({"residual.skips": ((0, 9),)}, "model.residual.skips names layer 9"),
        ({"residual.backout": 3}, "model.residual.backout is 3, the last layer"),
        ({"embeddings.value_layers": ((0, 1),)}, "uses tables [1]; number them from 0 without a gap"),
        ({"embeddings.value_layers": ((0, 0), (1, -1))}, "uses tables [-1, 0]"),
        ({"embeddings.value_layers": ((0, 0),), "no_attention": (0,)}, "layer 0, which has no attention"),
        ({"embeddings.value_layers": ((0, 0), (0, 0))}, "gives a layer two tables"),
        (
            {"attention.long_layers": (1,), "no_attention": (1,)},
            "model.attention.long_layers names layer 1, which has no attention",
        ),
        ({"residual.skips": ((0, 2), (0, 2))}, "model.residual.skips has 0 -> 2 more than once"),
        ({"attention.gates": True, "no_attention": (0, 1, 2, 3)}, "which needs a layer with attention"),
        (
            {"num_heads": 3},
            "model.dim 32 does not split into 3 heads of even width; model.num_heads may be one of 1, 2, 4",
        ),
        ({"head.untie": True}, "model.head.untie is True, which needs a tied head"),
        ({"embeddings.second": True}, "which needs model.residual.x0_lambdas=True"),
        ({"embeddings.value_gates": True}, "which needs tables"),
        ({"residual.skip_gates": True}, "which needs skips"),
        ({"attention.key_offset": True}, "which needs model.attention.rotary=half"),
        ({"attention.key_offset": True, "attention.rotary": "half"}, "which needs long layers"),
        ({"attention.rotary": "half", "num_heads": 1, "dim": 30}, "which needs head widths of 4n, not 30"),
        ({"attention.gates": True, "gate_inputs": 0}, "model.gate_inputs is 0; it must be at least 1"),
        ({"embeddings.smear": True, "gate_inputs": 33}, "model.gate_inputs is 33; the gates read 1 to 32 channels"),
        ({"head.softcap": "hard"}, "model.head.softcap is 'hard'; it must be one of: tanh, sigmoid, isru or None"),
        ({"head.fp8_scales": (1.0, 0.0, 1.0)}, "model.head.fp8_scales"),
    ],
)
def test_a_switch_that_cannot_act_is_refused_with_a_sentence(changes: dict, sentence: str) -> None:
    with pytest.raises(UserError) as e:
        with_fields(BASE, changes)
    assert sentence in str(e.value)


def test_the_table_says_which_layer_has_what() -> None:
    header, *rows = FULL.table()
    assert header[0] == "layer"
    assert rows[2][1] == "-", "layer 2 has no attention"
    assert rows[2][5] == "from 0"
    assert rows[3][3] == "long"
    assert "backout" in rows[1][6]
