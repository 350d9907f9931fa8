"""Constructors: full signatures, torch's names answered with ours, and bad values refused by name."""

import inspect
import re
import subprocess
import sys
import typing

import pytest
import torch
from torch import nn

from speedrun.optim import Adam, Combined, Muon, NorMuon, Snoo, orthogonalize

CLASSES = [Adam, Muon, NorMuon]


def matrix() -> list[tuple[str, nn.Parameter]]:
    return [("w", nn.Parameter(torch.ones(8, 8)))]


class Mine(Muon):
    """A subclass without a constructor."""


class Passing(NorMuon):
    def __init__(self, params, **options) -> None:
        super().__init__(params, **options)


@pytest.mark.parametrize("cls", CLASSES)
def test_signatures_are_full_and_typed(cls) -> None:
    parameters = inspect.signature(cls.__init__).parameters
    hints = typing.get_type_hints(cls.__init__)
    assert set(parameters) - {"self"} <= set(hints)
    assert hints["unknown"] is typing.Never  # so that type checkers refuse what is misspelt
    optimizer = cls(matrix())
    assert set(optimizer.defaults) == set(parameters) - {"self", "params", "unknown"}
    assert set(cls.per_parameter) <= set(optimizer.defaults)


def test_normuon_has_every_argument_of_muon_with_its_default() -> None:
    muon, normuon = (inspect.signature(cls.__init__).parameters for cls in (Muon, NorMuon))
    assert [normuon[name] for name in muon] == list(muon.values())
    assert set(normuon) - set(muon) == {"beta2", "axis"}


@pytest.mark.parametrize("cls", [*CLASSES, Mine, Passing])
def test_a_misspelt_option_is_refused_in_subclasses_too(cls) -> None:
    said = f"{cls.__name__} has no argument 'weigth_decay'; it has lr, "
    with pytest.raises(TypeError, match=said):
        cls(matrix(), weigth_decay=0.1)


TORCHS = [
    (Muon, "ns_steps", 5, "it is called steps here"),
    (NorMuon, "ns_coefficients", (3.4445, -4.775, 2.0315), "coefficients here and takes triples: coefficients=[(a, b"),
    (Muon, "adjust_lr_fn", "original", "it is called scale here: 'original' is scale='spectral'"),
    (Muon, "eps", 1e-7, "leave it out"),
    (Muon, "betas", (0.9, 0.95), "it is called momentum (and beta2 in NorMuon) here"),
    (Adam, "amsgrad", True, "torch.optim.AdamW(amsgrad=True), also inside Combined"),
    (Adam, "fused", True, "leave it out: Adam uses torch's fused kernel by itself"),
    (Adam, "nesterov", True, "torch.optim.NAdam"),
    (Adam, "decoupled_weight_decay", True, "weight decay is always decoupled"),
    *[(cls, "maximize", True, "negate the loss: (-loss).backward()") for cls in CLASSES],
    *[(cls, key, True, "leave it out") for key in ("foreach", "capturable", "differentiable") for cls in CLASSES],
]


@pytest.mark.parametrize(("cls", "key", "value", "way_out"), TORCHS)
def test_torchs_names_are_answered_with_ours(cls, key, value, way_out) -> None:
    with pytest.raises(TypeError, match=rf"{cls.__name__} has no argument '{key}'; .*{re.escape(way_out)}"):
        cls(matrix(), **{key: value})
    if key == "decoupled_weight_decay":
        return
    with pytest.raises(ValueError, match=rf"A group has {key}=.*{cls.__name__} does not know; .*{re.escape(way_out)}"):
        cls([{"params": matrix(), key: value}])


def test_every_argument_of_torchs_optimizers_works_or_is_answered() -> None:
    for ours, theirs in ((Adam, torch.optim.Adam), (Adam, torch.optim.AdamW), (Muon, torch.optim.Muon)):
        for key in set(inspect.signature(theirs.__init__).parameters) - {"self", "params"}:
            if key not in ours(matrix()).defaults:
                with pytest.raises(TypeError, match=rf"no argument '{key}'; (leave it out|it is called)"):
                    ours(matrix(), **{key: 0})


def test_groups_of_adamw_are_taken_and_what_is_off_in_them_is_not_asked_for() -> None:
    group = torch.optim.AdamW(matrix(), lr=0.25, betas=(0.8, 0.9)).param_groups[0]
    ours = Adam([group]).param_groups[0]
    assert (ours["lr"], ours["betas"], ours["maximize"], ours["foreach"]) == (0.25, (0.8, 0.9), False, None)


BAD = [
    ({"lr": torch.tensor([0.1, 0.2])}, "lr is a tensor of 2 elements, tensor([0.1000, 0.2000]); a Tensor lr"),
    ({"lr": "fast"}, "lr is 'fast'; it must be finite and not negative"),
    ({"lr": None}, "lr is None; it must be a number"),
    ({"weight_decay": torch.zeros(3)}, "weight_decay is a tensor of 3 elements"),
    ({"lr_mul": "2"}, "lr_mul is '2'; it must be finite"),
    ({"wd_mul": [torch.ones(2)]}, "wd_mul is a tensor of 2 elements"),
]
BAD_MUON = [
    ({"momentum": torch.zeros(2)}, "momentum is a tensor of 2 elements"),
    ({"update_ema": "x"}, "update_ema is 'x'; it must be at least 0 and below 1"),
    ({"steps": 5.0}, "steps is 5.0; it must be at least 1, and whole"),
    ({"method": "ns"}, "method is 'ns'; it must be one of: polar-express, newton-schulz, svd"),
    ({"method": None}, "method is None; it must be one of"),
    ({"scale": "original"}, "scale is 'original'; it must be one of: unit-variance, spectral, match-rms-adamw"),
    (
        {"scale": "none"},
        "scale is 'none'; it must be one of: unit-variance, spectral, match-rms-adamw, unit-rms-norm, or None",
    ),
    ({"coefficients": (3.4445, -4.775, 2.0315)}, "it must hold triples (a, b, c), at least one"),
    ({"coefficients": 3.0}, "coefficients is 3.0; it must hold triples"),
]
BAD_ADAM = [
    ({"betas": 0.9}, "betas is 0.9; it must be two numbers"),
    ({"betas": (0.9, torch.zeros(2))}, "betas is a tensor of 2 elements"),
    ({"eps": "small"}, "eps is 'small'; it must be finite"),
    ({"every": 1.5}, "every is 1.5; it must be at least 1, and whole"),
]


@pytest.mark.parametrize(
    ("cls", "options", "sentence"),
    [(cls, *case) for cls in CLASSES for case in BAD]
    + [(cls, *case) for cls in (Muon, NorMuon) for case in BAD_MUON]
    + [(Adam, *case) for case in BAD_ADAM]
    + [(NorMuon, {"beta2": torch.zeros(2)}, "beta2 is a tensor of 2 elements")],
)
def test_a_bad_value_is_refused_by_name_in_the_constructor_and_in_a_group(cls, options, sentence) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        cls(matrix(), **options)
    optimizer = cls(matrix())
    with pytest.raises(ValueError, match=re.escape(sentence)):
        optimizer.add_param_group({"params": [("v", nn.Parameter(torch.ones(8, 8)))], **options})
    assert len(optimizer.param_groups) == 1, "nothing has changed"


@pytest.mark.parametrize("lr", [torch.tensor(0.1), torch.tensor([0.1])])
@pytest.mark.parametrize("cls", CLASSES)
def test_a_tensor_with_one_value_is_a_learning_rate(cls, lr) -> None:
    (a,), (b,) = (dict(matrix()).values() for _ in range(2))
    for p, rate in ((a, lr), (b, 0.1)):
        p.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        cls([p], lr=rate).step()
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: Combined([Adam(matrix())]), "Combined got a list; pass optimizers, one after the other"),
        (lambda: Combined(nn.Linear(2, 2).parameters()), "Combined got a generator; pass optimizers"),
        (lambda: Combined(), "Combined got no optimizers"),
        (lambda: Snoo(matrix()), "Snoo got a list; wrap it around an optimizer: Snoo(Adam(...))"),
        (lambda: Snoo(Adam(matrix()), k=2.5), "k is 2.5; it must be at least 1, and whole"),
        (lambda: Snoo(Adam(matrix()), lr=torch.zeros(2)), "lr is a tensor of 2 elements"),
        (lambda: Snoo(Adam(matrix()), momentum="0.3"), "momentum is '0.3'; it must be at least 0 and below 1"),
        (lambda: orthogonalize(torch.eye(2), method="qr"), "method is 'qr'"),
        (lambda: orthogonalize(torch.eye(2), steps=2.5), "steps is 2.5"),
    ],
)
def test_what_surrounds_them_refuses_by_name(build, sentence) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        build()


# From the sources of torch.optim.Muon (adjust_lr_fn), Dion (adjust_lr), NVIDIA's Emerging-Optimizers (scale_mode).
ELSEWHERE = {
    "spectral": lambda out, into: max(1, out / into) ** 0.5,  # "original"; -; "shape_scaling"
    "match-rms-adamw": lambda out, into: 0.2 * max(out, into) ** 0.5,  # "match_rms_adamw"; "rms_norm"; -
    "unit-variance": lambda out, into: max(out, into) ** 0.5,  # -; -; "spectral"
    "unit-rms-norm": lambda out, into: (out / into) ** 0.5,  # -; "spectral_norm"; "unit_rms_norm"
    None: lambda out, into: 1.0,  # -; None; -
}


@pytest.mark.parametrize("scale", ELSEWHERE)
@pytest.mark.parametrize("shape", [(12, 12), (48, 12), (12, 48)])
def test_scales_are_those_of_others(scale, shape) -> None:
    p = nn.Parameter(torch.zeros(shape))
    p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    Muon([p], lr=1.0, scale=scale, method="svd", momentum=0.0).step()
    sizes = torch.linalg.svdvals(p.detach())
    torch.testing.assert_close(sizes, torch.full_like(sizes, ELSEWHERE[scale](*shape)), atol=1e-4, rtol=1e-4)


def test_importing_them_loads_torch_and_nothing_else() -> None:
    """Not even torch._dynamo, which brings sympy: torch's own optimizers load it when one is made."""
    program = """
import sys
import torch
before = set(sys.modules)
import speedrun.optim
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
print(*sorted(name for name in sys.modules if name.startswith("speedrun") and not name.startswith("speedrun.optim")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded, rooms = done.stdout.splitlines()
    generated = {"_remote_module_non_scriptable"}  # by torch.distributed.nn, while it is imported
    assert set(loaded.split()) - sys.stdlib_module_names - generated - {"torch"} == {"speedrun"}
    assert rooms == "speedrun speedrun.lazy"
