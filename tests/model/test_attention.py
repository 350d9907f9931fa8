"""Every way to compute attention against the definition."""

import functools
import sys
import types
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from speedrun.errors import UserError
from speedrun.model import attention, flash
from speedrun.model.attention import (
    MIN_BLOCK,
    WIDE,
    Backend,
    Documents,
    attend,
    attend_locally,
    attention_mask,
    choose_backend,
    local_mask,
    plain_mask,
    reference_attend,
    takes_cu_seqlens,
    try_out,
)
from speedrun.model.config import AttentionConfig, InitConfig
from speedrun.model.flash import cu_seqlens_of, row_cu_seqlens
from speedrun.model.gpt import GPT, GPTConfig, Windows
from tests.model.kernels import Kernels


def some(B: int, T: int, H: int, K: int, seed: int, grad: bool = False) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, H, K, generator=gen).requires_grad_(grad) for _ in range(3)]


def locally(q, k, v, documents, window, scale=None) -> torch.Tensor:
    mask = local_mask(q.shape[1], q.device, documents, window)
    return attend_locally(q, k, v, window=window, mask=mask, scale=scale)


def numbered(B: int, T: int, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (torch.rand(B, T, generator=gen) < 0.08).long().cumsum(1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 200), st.integers(0, 90), st.booleans(), st.sampled_from([None, 0.1]),
    st.integers(0, 999),
)  # fmt: skip
def test_attention_is_its_definition(B, T, window, packed, scale, seed) -> None:
    q, k, v = some(B, T, 2, 8, seed)
    documents = numbered(B, T, seed) if packed else None
    expected = reference_attend(q, k, v, doc_ids_BT=documents, window=window, scale=scale)
    torch.testing.assert_close(attend(q, k, v, doc_ids_BT=documents, window=window, scale=scale), expected)
    torch.testing.assert_close(locally(q, k, v, documents, window=window, scale=scale), expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [WIDE, WIDE + 1])
def test_a_wide_window_in_blocks_of_half_its_width_is_the_definition(window, packed) -> None:
    T = 3 * WIDE + 30
    q, k, v = some(2, T, 1, 4, window)
    documents = (torch.arange(2 * T).view(2, T) % T > 300).long() if packed else None
    expected = reference_attend(q, k, v, doc_ids_BT=documents, window=window)
    torch.testing.assert_close(locally(q, k, v, documents, window=window), expected)
    torch.testing.assert_close(attend(q, k, v, doc_ids_BT=documents, window=window), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_block_by_block_are_those_of_the_definition(packed) -> None:
    T, window = 3 * MIN_BLOCK + 5, 20
    documents = numbered(2, T, 1) if packed else None
    weights = torch.randn(2, T, 2, 8, generator=torch.Generator().manual_seed(9))
    grads = []
    for function in (attend, reference_attend):
        q, k, v = some(2, T, 2, 8, 5, grad=True)
        (function(q, k, v, doc_ids_BT=documents, window=window) * weights).sum().backward()
        grads.append((q.grad, k.grad, v.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("B", "T", "window"), [(1, 700, 20), (2, 333, 70), (3, 5 * WIDE, 2 * WIDE), (1, 40, 0)])
def test_long_rows_in_pieces_are_the_same_rows(B, T, window, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = numbered(B, T, 3)
    results = []
    for limit in (2**40, 2**10):  # whole, and as many pieces as there can be
        monkeypatch.setattr(attention, "PIECE_BYTES", limit)
        q, k, v = some(B, T, 2, 4, 7, grad=True)
        y = locally(q, k, v, documents, window=window)
        y.square().sum().backward()
        results.append((y, q.grad, k.grad, v.grad))
    for whole, pieced in zip(*results, strict=True):
        torch.testing.assert_close(pieced, whole)


def test_a_window_of_one_sees_the_token_and_the_one_before() -> None:
    q, k, v = some(1, 100, 1, 4, 0)
    one = attend(q, k, v, window=1)
    v2 = v.clone()
    v2[:, 50] += 1
    changed = (attend(q, k, v2, window=1) - one).abs().sum((0, 2, 3)) > 1e-6
    assert changed.nonzero().flatten().tolist() == [50, 51]


# -------------------------------------------------------------------------------------------- every backend


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Both kernels, as if loaded."""
    stand_ins = Kernels()
    monkeypatch.setattr(flash, "_fa3", stand_ins.flash_attn_varlen_func)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_ins.varlen_attn)
    return stand_ins


def offset(B: int, T: int, kind: str) -> torch.Tensor | None:
    """Documents that begin in the middle of rows; `runs on`: a row begins with the number that ends the one before."""
    documents = numbered(B, T, 3)
    if kind == "runs on":
        documents += torch.cat([documents.new_zeros(1), (documents[:-1, -1] - documents[1:, 0]).cumsum(0)])[:, None]
    return None if kind == "none" else documents


@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize("window", [None, 0, 1, 33, 200])
@pytest.mark.parametrize("kind", ["none", "packed", "runs on"])
@pytest.mark.parametrize(("B", "T"), [(3, 70), (1, 300)])
@pytest.mark.parametrize("backend", get_args(Backend))
def test_every_backend_is_the_definition_forward_and_backward(kernels, backend, B, T, kind, window, scale) -> None:
    documents = offset(B, T, kind)
    weights = torch.randn(B, T, 2, 8, generator=torch.Generator().manual_seed(9))
    results = []
    for function in (functools.partial(attend, backend=backend), reference_attend):
        qkv = [x.bfloat16().requires_grad_() for x in some(B, T, 2, 8, T)]
        y = function(*qkv, doc_ids_BT=documents, window=window, scale=scale)
        results.append((y, *torch.autograd.grad(y, qkv, weights.bfloat16())))
    tolerance = 0.03 if backend == "sdpa" else 1e-6  # the stand-ins round once, at the end, as the definition does
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    for call in kernels.calls:
        assert call["window"] == (-1 if window is None else window, 0)
        assert call["max_seqlen"] == T
        assert (
            call["cu_seqlens"]
            == (row_cu_seqlens(B, T, y.device) if documents is None else cu_seqlens_of(documents)).tolist()
        )
    assert len(kernels.calls) == (backend != "sdpa") == takes_cu_seqlens(backend)


@pytest.mark.parametrize("backend", ["fa3", "varlen"])
def test_the_stand_ins_refuse_what_the_kernels_refuse_or_misread(kernels, backend, monkeypatch) -> None:
    q = k = v = torch.zeros(2, 10, 1, 8, dtype=torch.bfloat16)
    call = functools.partial(flash.attend_flash, backend, window=3, scale=None)
    cu_seqlens = torch.tensor([0, 4, 10, 20], dtype=torch.int32)
    call(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=10)
    for bad in (
        {"cu_seqlens": cu_seqlens.long()},
        {"cu_seqlens": cu_seqlens[1:]},
        {"cu_seqlens": cu_seqlens[:-1]},
        {"max_seqlen": 9},
        {"window": 3.0},
    ):
        with pytest.raises(AssertionError):
            call(q, k, v, **{"cu_seqlens": cu_seqlens, "max_seqlen": 10, **bad})
    with pytest.raises(AssertionError):
        call(q.float(), k.float(), v.float(), cu_seqlens=cu_seqlens, max_seqlen=10)
    flat, names = q.view(20, 1, 8), flash.KEYWORDS[backend]
    how = dict(zip(names, (cu_seqlens, cu_seqlens, 10, 10, 0.1, (3, -1), True), strict=False))
    function = getattr(kernels, "varlen_attn" if backend == "varlen" else "flash_attn_varlen_func")
    with pytest.raises(AssertionError, match="a key ahead"):
        function(flat, flat, flat, **how)
    monkeypatch.setitem(flash.KEYWORDS, backend, ("cu_seqlens", *names[1:]))
    with pytest.raises(TypeError, match="cu_seq"):
        call(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=10)


@pytest.mark.parametrize("backend", ["fa3", "varlen"])
def test_a_bound_shorter_than_the_row_reaches_the_kernel(kernels, backend) -> None:
    documents = torch.arange(60).view(1, 60) // 20
    found = Documents(documents, cu_seqlens_of(documents), max_seqlen=20)
    shared = attention_mask(backend, 1, 60, documents.device, [None], found)
    q = torch.zeros(1, 60, 1, 8, dtype=torch.bfloat16)
    attend(q, q, q, shared=shared)
    assert kernels.calls == [{"cu_seqlens": [0, 20, 40, 60], "max_seqlen": 20, "window": (-1, 0)}]


@pytest.mark.parametrize("backend", ["fa3", "varlen"])
def test_empty_documents_at_the_end_change_nothing(kernels, backend) -> None:
    """The loader pads boundaries with them."""
    documents = numbered(2, 60, 3)
    cu_seqlens = cu_seqlens_of(documents)
    found = []
    for padded in (cu_seqlens, torch.cat([cu_seqlens, cu_seqlens[-1:].expand(9)])):
        q, k, v = (x.bfloat16().requires_grad_() for x in some(2, 60, 2, 8, 3))
        mask = attention_mask(backend, 2, 60, documents.device, [None], Documents(documents, padded))
        y = attend(q, k, v, shared=mask)
        found.append((y, *torch.autograd.grad(y.float().square().sum(), (q, k, v))))
    assert kernels.calls[1]["cu_seqlens"] == kernels.calls[0]["cu_seqlens"] + [120] * 9
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_flash_attention_is_asked_to_be_deterministic_where_torch_is(kernels) -> None:
    q = torch.zeros(1, 60, 1, 8, dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        attend(q, q, q, backend="fa3")  # the stand-in compares
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(kernels.calls) == 1


def test_edges_are_where_documents_begin_in_rows_laid_end_to_end() -> None:
    assert cu_seqlens_of(torch.tensor([[0, 0, 1, 2], [2, 2, 2, 2]])).tolist() == [0, 2, 3, 4, 8]
    assert cu_seqlens_of(torch.tensor([[5]])).tolist() == [0, 1]
    assert (
        cu_seqlens_of(torch.zeros(3, 4)).tolist() == row_cu_seqlens(3, 4, torch.device("cpu")).tolist() == [0, 4, 8, 12]
    )


# -------------------------------------------------------------------------------------------- in a model

MODEL = GPTConfig(
    vocab_size=61,
    num_layers=3,
    dim=32,
    num_heads=2,
    no_attention=(1,),
    attention=AttentionConfig(long_layers=(0, 2)),
    init=InitConfig(zero_init=False),
)


def batch(B: int, T: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(61, (B, T), generator=torch.Generator().manual_seed(seed)), numbered(B, T, seed)


def test_a_model_has_the_same_loss_with_every_backend(kernels: Kernels) -> None:
    ids, documents = batch(2, 150, 4)
    found = []
    for backend in get_args(Backend):
        torch.manual_seed(0)
        model = GPT(MODEL, 150, backend)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found.append(model(ids, ids.roll(-1, 1), Documents(documents), windows=Windows(8, 40)).item())
    assert found == pytest.approx([found[-1]] * 3, rel=2e-3)
    assert found[0] == found[1]


def test_layers_share_one_mask_per_window(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(attention, "plain_mask", lambda *a: made.append(a[-1]) or plain_mask(*a))
    ids, documents = batch(2, 150, 4)
    GPT(MODEL, 150)(ids, ids.roll(-1, 1), Documents(documents), windows=Windows(8, 40))
    assert made == [8, 40]


@pytest.mark.parametrize("backend", ["fa3", "varlen"])
def test_one_graph_serves_any_number_of_documents(kernels: Kernels, backend: Backend) -> None:
    torch._dynamo.reset()
    plain, model = GPT(MODEL, 150), GPT(MODEL, 150, backend)
    model.load_state_dict(plain.state_dict())
    call = torch.compile(model, backend="eager", dynamic=False, fullgraph=True)
    try:
        for seed in range(4):
            ids, documents = batch(2, 150, seed)
            cu_seqlens = F.pad(cu_seqlens_of(documents), (0, seed), value=documents.numel())
            torch._dynamo.mark_dynamic(cu_seqlens, 0)
            with torch.autocast("cpu", torch.bfloat16):
                loss = call(ids, ids.roll(-1, 1), Documents(documents, cu_seqlens), windows=Windows(8, 40))
                expected = plain(ids, ids.roll(-1, 1), Documents(documents), windows=Windows(8, 40))
            loss.backward()
            assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
            torch.compiler.set_stance("fail_on_recompile")
    finally:
        torch.compiler.set_stance("default")


# -------------------------------------------------------------------------------------------- which one


BF16 = torch.bfloat16
CURE = "to get it, pip install 'speedrun[gpu]' and let this machine reach the Hugging Face hub"


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    """As if torch saw an NVIDIA GPU; kernels are tried on the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(attention, "try_out", lambda name, device, *rest: try_out(name, torch.device("cpu"), *rest))
    return torch.device("cuda")


def hub(monkeypatch: pytest.MonkeyPatch, get_kernel: Any) -> None:
    """A package `kernels` with this function; None: no such package."""
    package = types.ModuleType("kernels") if get_kernel else None
    if package:
        package.get_kernel = get_kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", package)
    monkeypatch.setattr(flash, "_fa3", None)


def test_hopper_takes_flash_attention_where_it_works(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, (9, 0))
    hub(monkeypatch, lambda repo, **_: kernels)
    random = torch.get_rng_state()
    assert choose_backend("auto", device, BF16, 128) == ("fa3", "this GPU has it", None)
    assert choose_backend("fa3", device, BF16, 128) == ("fa3", "as asked", None)
    assert choose_backend("varlen", device, BF16, 128) == ("varlen", "as asked", None)
    assert torch.equal(random, torch.get_rng_state())
    for dtype, width, why in (
        (torch.float32, 128, "computes in bfloat16 or float16, not in float32"),
        (BF16, 36, "needs heads of 8n up to 256 channels, not 36"),
        (BF16, 264, "needs heads of 8n up to 256 channels, not 264"),
    ):
        said = f"Flash Attention 3 {why}; torch's varlen_attn {why}"
        assert choose_backend("auto", device, dtype, width) == ("sdpa", said, None)
        for asked in ("fa3", "varlen"):
            with pytest.raises(UserError, match=why):
                choose_backend(asked, device, dtype, width)


class Older(Kernels):
    def flash_attn_varlen_func(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
        raise AssertionError("never called")


class Falling(Kernels):
    def compute(self, *_: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available\nfor execution on the device")


class Blind(Kernels):
    """Without a window."""

    def compute(self, q, k, v, cu_seqlens, max_seqlen, scale, window) -> torch.Tensor:
        return super().compute(q, k, v, cu_seqlens, max_seqlen, scale, (-1, 0))


def offline(repo: str, **_: object) -> Kernels:
    raise ConnectionError("cannot reach huggingface.co\nTraceback")


@pytest.mark.parametrize(
    ("get_kernel", "why"),
    [
        (None, "the package `kernels` cannot be imported (ModuleNotFoundError: import of kernels halted"),
        (offline, "kernels-community/flash-attn3: ConnectionError: cannot reach huggingface.co; varunneal"),
        (lambda repo, **_: object(), "AttributeError: 'object' object has no attribute 'flash_attn_varlen_func'"),
        (lambda repo, **_: Older(), "flash_attn_varlen_func does not take softmax_scale, window_size"),
        (lambda repo, **_: Falling(), "RuntimeError: CUDA error: no kernel image is available; varunneal"),
        (lambda repo, **_: Blind(), "ArithmeticError: its results are not those of attention"),
    ],
    ids=["no package", "no network", "no function", "another version", "raises", "wrong numbers"],
)
def test_without_flash_attention_hopper_takes_varlen_and_says_so_loudly(
    get_kernel: Any, why: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = gpu(monkeypatch, (9, 0))
    hub(monkeypatch, get_kernel)
    name, reason, warning = choose_backend("auto", device, BF16, 128)
    assert (name, reason) == ("varlen", "Flash Attention 3 does not work here")
    assert warning is not None
    assert warning.startswith("WARNING: Flash Attention 3 is made for this GPU, but cannot be used: ")
    assert warning.endswith(f"; {CURE}; attention is computed by varlen instead")
    assert why in warning
    assert "\n" not in warning
    with pytest.raises(UserError) as refusal:
        choose_backend("fa3", device, BF16, 128)
    assert why in str(refusal.value)
    assert str(refusal.value).endswith(
        f"; {CURE}; here there is varlen, sdpa: choose that, or leave the choice to --attention auto."
    )


def test_the_other_build_is_taken_when_the_first_does_not_work(kernels: Kernels, monkeypatch) -> None:
    asked = []

    # As in kernels 0.17, https://github.com/huggingface/kernels
    def get_kernel(
        repo_id: str, *, revision: str | None = None, version: int | None = None, backend: str | None = None,
        user_agent: object = None, trust_remote_code: bool | list[str] = False, check_arch: bool = True,
    ) -> Kernels:  # fmt: skip
        asked.append((repo_id, revision, version, trust_remote_code))
        return Falling() if len(asked) == 1 else kernels

    hub(monkeypatch, get_kernel)
    assert choose_backend("auto", gpu(monkeypatch, (9, 0)), BF16, 64) == ("fa3", "this GPU has it", None)
    assert asked == [(name, "v1", None, [name]) for name in flash.HUB]
    assert flash.HUB[0].startswith("kernels-community/")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_since_ampere_take_varlen(capability, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    device, here = gpu(monkeypatch, capability), ".".join(map(str, capability))
    why = f"Flash Attention 3 needs an NVIDIA Hopper GPU, compute capability 9.x ({here} here)"
    assert choose_backend("auto", device, BF16, 128) == ("varlen", why, None)
    with pytest.raises(UserError, match=r"'fa3' was asked for, but .*; here there is varlen, sdpa: choose"):
        choose_backend("fa3", device, BF16, 128)


def test_a_varlen_that_does_not_work_is_said_loudly_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, (8, 0))  # torch's own raises on the CPU, where it is tried
    name, _, warning = choose_backend("auto", device, BF16, 128)
    assert name == "sdpa"
    assert warning is not None
    assert "torch's varlen_attn is made for this GPU, but cannot be used: NotImplementedError: Could not run" in warning
    with pytest.raises(
        UserError, match=r"'varlen' was asked for, but .*install a build of torch.*; here there is sdpa"
    ):
        choose_backend("varlen", device, BF16, 128)


def test_amd_and_gpus_before_ampere_take_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, (7, 5))
    name, why, warning = choose_backend("auto", device, torch.float16, 128)
    assert (name, warning) == ("sdpa", None)
    assert "torch's varlen_attn needs an NVIDIA GPU, compute capability 8.0 or later (7.5 here)" in why
    gpu(monkeypatch, (9, 4))
    monkeypatch.setattr(torch.version, "cuda", None)
    name, why, _ = choose_backend("auto", device, BF16, 128)
    assert name == "sdpa"
    assert "compute capability 9.x (torch is no CUDA build)" in why


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_without_a_gpu_of_nvidia_it_is_sdpa(kind: str) -> None:
    device = torch.device(kind)
    name, why, warning = choose_backend("auto", device)
    assert (name, warning) == ("sdpa", None)
    assert f"varlen_attn needs an NVIDIA GPU, compute capability 8.0 or later (the device is {kind})" in why
    for asked in ("fa3", "varlen"):
        with pytest.raises(UserError, match=f"Attention '{asked}' was asked for, but .*; here there is sdpa: choose"):
            choose_backend(asked, device)
    with pytest.raises(UserError, match="Unknown attention 'flash'"):
        choose_backend("flash", device)
