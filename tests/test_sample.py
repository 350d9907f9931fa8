"""Text from a model: what it sees of a long text, chance, the end of a document, and mistakes."""

import pytest
import torch
import torch.nn.functional as F

from speedrun.data.tokenizer import Tokenizer
from speedrun.model.gpt import GPT, GPTConfig, Windows
from speedrun.sample import generate, pick, sample_text
from speedrun.training.config import with_fields

VOCAB = 50


def model_with(context: int, changes: dict[str, object] | None = None) -> GPT:
    """Random weights everywhere: an untrained head is zero, and every token would be the likeliest."""
    config = GPTConfig(vocab_size=VOCAB, num_layers=2, dim=16, num_heads=2)
    model = GPT(with_fields(config, changes or {}), context)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5, generator=generator)
    return model


@torch.no_grad()
def greedy_by_definition(model: GPT, ids: list[int], tokens: int) -> list[int]:
    """The likeliest token after the last `context` ones, again and again."""
    ids = list(ids)
    for _ in range(tokens):
        features_TD = model.features(torch.tensor([ids[-model.context :]]))[0]
        ids.append(int(F.linear(features_TD[-1], model.head_weight(tied=False)).argmax()))
    return ids[-tokens:]


FORMS = [
    {},
    {"head.tied": True, "attention.qk_norm": False, "attention.residual_scale": "depth"},
    {"embeddings.smear": True, "head.smear_mtp": True, "gate_inputs": 4},
    {
        "attention.rotary": "half", "attention.key_offset": True, "attention.long_layers": (1,),
        "attention.rotary_base": 100.0,
    },
    {
        "embeddings.value_layers": ((1, 0),), "embeddings.value_gates": True, "attention.gates": True, "gate_inputs": 4,
        "residual.skips": ((0, 1),), "residual.skip_gates": True, "residual.x0_lambdas": True,
        "embeddings.second": True, "residual.backout": 0, "attention.lambdas": True, "residual.lambdas": 1.1,
        "head.softcap": "sigmoid",
    },
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("context", "prompt"), [(64, 3), (8, 3), (8, 8), (8, 9), (8, 21), (2, 5), (1, 4)])
def test_every_form_writes_what_its_features_say(context: int, prompt: int, form: dict[str, object]) -> None:
    """Also for prompts longer than the window, and for texts that outgrow it."""
    model = model_with(context, form)
    ids = torch.randint(VOCAB, (prompt,), generator=torch.Generator().manual_seed(prompt)).tolist()
    assert list(generate(model, ids, tokens=20, temperature=0)) == greedy_by_definition(model, ids, 20)


def test_the_window_matters() -> None:
    """Otherwise the comparison above would prove nothing about it."""
    short, long = model_with(4), model_with(64)
    ids = list(range(10))
    assert list(generate(short, ids, tokens=20, temperature=0)) != list(generate(long, ids, tokens=20, temperature=0))


def test_the_same_seed_gives_the_same_text_and_another_does_not() -> None:
    model = model_with(16)
    texts = [list(generate(model, [1, 2], tokens=30, seed=seed)) for seed in (5, 5, 6)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_top_1_is_greedy_at_any_temperature() -> None:
    model = model_with(16)
    greedy = list(generate(model, [1, 2], tokens=30, temperature=0))
    assert list(generate(model, [1, 2], tokens=30, temperature=1.7, top_k=1, seed=3)) == greedy


def test_only_the_top_k_are_ever_chosen() -> None:
    logits = torch.arange(10.0)
    generator = torch.Generator().manual_seed(0)
    assert {pick(logits, 5.0, 3, generator) for _ in range(200)} == {7, 8, 9}
    assert len({pick(logits, 100.0, None, generator) for _ in range(500)}) == 10
    assert len({pick(logits, 100.0, 99, generator) for _ in range(500)}) == 10


def test_the_stop_token_ends_the_text_and_is_not_part_of_it() -> None:
    model = model_with(16)
    text = list(generate(model, [1, 2], tokens=30, temperature=0))
    stop = text[4]
    assert list(generate(model, [1, 2], tokens=30, temperature=0, stop=stop)) == text[: text.index(stop)]


def test_no_tokens_is_an_empty_text() -> None:
    assert list(generate(model_with(16), [1], tokens=0)) == []


def test_the_text_begins_with_the_prompt() -> None:
    tokenizer = Tokenizer.load("pocket")
    model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, num_layers=1, dim=16, num_heads=2), 16)
    torch.nn.init.normal_(model.head)
    text = sample_text(model, tokenizer, "Once upon", tokens=8, temperature=0.8, top_k=50, seed=0)
    assert text.startswith("Once upon")
    assert len(text) > len("Once upon")


@torch.no_grad()
def test_sampling_sees_the_windows_and_positions_of_the_end_of_training() -> None:
    form = {
        "attention.rotary": "half",
        "attention.rotary_base": 100.0,
        "attention.yarn": True,
        "attention.long_layers": (1,),
        "attention.scale": 0.1,
    }
    model = model_with(64, form)
    ids = torch.arange(30)[None] % VOCAB
    plain = model.logits(ids)
    model.as_trained(Windows(2, 4), (2, 4), tied=False)
    windowed = model.logits(ids)
    assert not torch.allclose(plain, windowed)
    features = model.features(ids, windows=Windows(2, 4))[0, -1]
    torch.testing.assert_close(windowed[0], F.linear(features, model.head_weight(tied=False)))
