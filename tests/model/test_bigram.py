"""The bigram hash embedding against a reference that is written token by token, in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speedrun.errors import UserError
from speedrun.model.config import EmbeddingConfig, ResidualConfig
from speedrun.model.gpt import BIGRAM_SIGNS, GPT, Documents, GPTConfig, count_parameters
from speedrun.training.config import with_fields
from speedrun.training.optimizers import OptimConfig, Part, build_optimizer

LAYERS = 3
ROWS, WIDTH, NARROW = 50, 16, 12
# The residual stream alone: nothing but embeddings is added to it.
CONFIG = GPTConfig(
    vocab_size=4096, num_layers=LAYERS, dim=WIDTH, num_heads=2, no_attention=(0, 1, 2), no_mlp=(0, 1, 2), norm_eps=1e-6,
    residual=ResidualConfig(lambdas=1.1), embeddings=EmbeddingConfig(bigram_vocab_size=ROWS, bigram_dim=NARROW),
)  # fmt: skip
DOCUMENTS = [[0] * 9 + [1] + [2] * 15, [0] * 25]


def a_model(**changes: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(with_fields(CONFIG, changes), 25).double()
    gen = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=gen, dtype=torch.float64))
    return model


def wrapped(number: int) -> int:
    """A product as 32-bit integers have it."""
    return (number + 2**31) % 2**32 - 2**31


def places(ids: np.ndarray, documents: list[list[int]] | None) -> list[tuple[int, int, int, int]]:
    """(row of the batch, position, row of the table, row of signs) of every token."""
    found = []
    for b, tokens in enumerate(ids.tolist()):
        for t, token in enumerate(tokens):
            first = t == 0 or (documents is not None and documents[b][t] != documents[b][t - 1])
            before = 0 if first else tokens[t - 1]
            row = ROWS - 1 if first else (wrapped(36313 * token) ^ wrapped(27191 * before)) % (ROWS - 1)
            found.append((b, t, row, (before ^ token) % 8192))
    return found


def by_hand(
    model: GPT, ids: np.ndarray, documents: list[list[int]] | None, weights: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Features, and the gradients of their weighted sum with respect to the table and to the shares of the layers."""
    embed, table, shares, lambdas = (
        p.detach().numpy() for p in (model.embed, model.bigram_embed, model.bigram_lambdas, model.residual_lambdas)
    )
    signs = model.bigram_signs.numpy().astype(np.float64)
    features = np.zeros(weights.shape)
    to_table, to_shares = np.zeros_like(table), np.zeros_like(shares)
    for b, t, row, sign in places(ids, documents):
        pair = np.zeros(WIDTH)
        pair[:NARROW] = table[row] * signs[sign]
        streams = [embed[ids[b, t]]]
        for layer in range(LAYERS):
            streams.append(lambdas[layer] * streams[-1] + shares[layer] * pair)
        x = streams[-1]
        size = np.sqrt(np.mean(x * x) + 1e-6)
        features[b, t] = x / size
        g = weights[b, t] / size - x * np.dot(weights[b, t], x) / (WIDTH * size**3)
        for layer in reversed(range(LAYERS)):
            to_shares[layer] += np.dot(g, pair)
            to_table[row] += shares[layer] * g[:NARROW] * signs[sign]
            g = g * lambdas[layer]
    return features, to_table, to_shares


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_features_and_gradients_are_those_of_the_formula(packed: bool, across: bool) -> None:
    """The last token of the document before is used only where a recipe lets it."""
    model = a_model(across_documents=across)
    gen = np.random.default_rng(2)
    ids, weights = gen.integers(0, 4096, (2, 25)), gen.standard_normal((2, 25, WIDTH))
    documents = Documents(torch.tensor(DOCUMENTS)) if packed else None
    x = model.features(torch.from_numpy(ids), documents)
    (x * torch.from_numpy(weights)).sum().backward()
    expected = by_hand(model, ids, DOCUMENTS if packed and not across else None, weights)
    found: list[Tensor | None] = [x, model.bigram_embed.grad, model.bigram_lambdas.grad]
    for name, mine, theirs in zip(("features", "table", "shares"), found, expected, strict=True):
        assert mine is not None, name
        np.testing.assert_allclose(mine.detach().numpy(), theirs, rtol=1e-10, atol=1e-12, err_msg=name)


def test_with_the_vocabulary_of_gpt2_no_product_leaves_32_bits() -> None:
    """The record's are 32-bit and wrap around; here they have 64 bits."""
    assert max(36313, 27191) * 50_303 == wrapped(36313 * 50_303)


def test_signs_are_drawn_once_for_all_seeds() -> None:
    torch.manual_seed(1)
    one = GPT(CONFIG, 8).bigram_signs
    torch.manual_seed(2)
    assert torch.equal(one, GPT(CONFIG, 8).bigram_signs)
    assert one.shape == (BIGRAM_SIGNS, NARROW)
    assert set(one.unique().tolist()) == {-1, 1}
    assert abs(one.double().mean()) < 0.01
    assert "bigram_signs" not in GPT(CONFIG, 8).state_dict()


def test_it_starts_as_nothing_and_draws_nothing() -> None:
    """All other weights are those of the model without it."""
    small = GPTConfig(vocab_size=64, num_layers=2, dim=32, num_heads=2)
    models = []
    for config in (small, with_fields(small, {"embeddings.bigram_vocab_size": ROWS, "embeddings.bigram_dim": NARROW})):
        torch.manual_seed(0)
        models.append(GPT(config, 8))
    without, having = (dict(model.named_parameters()) for model in models)
    assert having.pop("bigram_embed").count_nonzero() == 0
    assert having.pop("bigram_lambdas").tolist() == pytest.approx([0.1, 0.1])
    assert without.keys() == having.keys()
    assert all(torch.equal(without[name], having[name]) for name in having)
    x = torch.arange(8)[None]
    assert torch.equal(*(model.features(x) for model in models))


def test_it_has_a_rate_of_its_own() -> None:
    model = GPT(CONFIG, 8)
    optimizer = build_optimizer(
        model.named_parameters(), model.param_roles(), OptimConfig(lr=0.01, bigram=Part(lr=75.0, beta1=0.75, decay=5.0))
    )
    (group,) = (g for g in optimizer.param_groups if g["part"] == "bigram")
    assert [tuple(p.shape) for p in group["params"]] == [(ROWS, NARROW)]
    assert (group["lr"], group["betas"][0], group["weight_decay"]) == pytest.approx((0.75, 0.75, 0.5))
    assert count_parameters(CONFIG)["bigram embeddings"] == ROWS * NARROW


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embeddings.bigram_vocab_size": 1, "embeddings.bigram_dim": 0}, "model.embeddings.bigram_vocab_size is 1"),
        ({"embeddings.bigram_dim": 17}, "model.embeddings.bigram_dim is 17, but model.dim only 16"),
        (
            {"embeddings.bigram_vocab_size": None},
            "model.embeddings.bigram_dim is 12, which needs model.embeddings.bigram_vocab_size",
        ),
        ({"embeddings.bigram_vocab_size": -5}, "embeddings.bigram_vocab_size is -5"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        a_model(**changes)
