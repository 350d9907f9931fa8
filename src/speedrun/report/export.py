"""A recipe as one file that trains by itself.

    speedrun export --recipe muon --out train.py
    python train.py --data TOKENS

The file is put together from `train.template`. A line of the template that begins with `#:` is an order:

    #: if NAME ... #: else ... #: end       keep what the recipe uses; NAME is one of `switches`, perhaps after `not`
    #: source FILE NAME NAME ...            these definitions, as they stand in the package

and <<model.width>> is the recipe's value of a field, or one of `values`. A recipe that uses anything the template does
not know is refused: every field that nobody asked about must have its default value.
"""

import ast
import functools
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import speedrun
from speedrun.errors import UserError
from speedrun.files import explained, write_atomic
from speedrun.model.gpt import GPT
from speedrun.model.head import SAFE_LIMIT
from speedrun.optim.config import PARTS, part_of
from speedrun.optim.muon import CHUNK_BYTES
from speedrun.optim.orthogonalize import NEWTON_SCHULZ, NEWTON_SCHULZ_PER_STEP, POLAR_EXPRESS
from speedrun.recipes import DEFAULT, get_recipe
from speedrun.tracks import get_track
from speedrun.train.config import Recipe, fields_of

PACKAGE = Path(speedrun.__file__).parent
TEMPLATE = Path(__file__).with_name("train.template")
PLACE = re.compile(r"<<([\w.]+)>>")
WHOLE = ("embed", "head", "embed2", "smear_gate", "skip_gates")  # parts that are one parameter, and have its name
SHORT_ROWS = 256  # tokens; in longer rows the package computes short windows block by block
COEFFICIENTS = {
    "polar-express": POLAR_EXPRESS,
    "newton-schulz": NEWTON_SCHULZ,
    "newton-schulz-per-step": NEWTON_SCHULZ_PER_STEP,
}


@dataclass(frozen=True)
class Export:
    """Write a recipe's training script as one file that needs torch and numpy alone."""

    recipe: str = DEFAULT
    """Which recipe; `speedrun recipes` lists them."""
    track: str = "pocket"
    """At the size of which track."""
    out: Path = Path("train.py")
    """The file to write."""
    force: bool = False
    """Replace the file if it exists. `--force` alone will do."""


def run(given: Export, say: Callable[[str], Any]) -> int:
    track = get_track(given.track)
    source = export(get_recipe(given.recipe, track.name))
    if given.out.is_dir():
        raise UserError(f"--out {given.out} is a folder; name a file in it, like {given.out / 'train.py'}.")
    if given.out.exists() and not given.force:
        raise UserError(f"{given.out} exists already; choose another --out, or pass --force to replace it.")
    if not given.out.parent.is_dir():
        raise UserError(f"There is no folder {given.out.parent} for {given.out.name}; make it first.")
    with explained(given.out):
        write_atomic(given.out, source)
    say(f"{given.recipe} at {given.track} size: {len(source.splitlines()):,} lines in {given.out}")
    try:
        data = shlex.quote(str(track.locate().path))
    except UserError:
        data = "TOKENS   (`speedrun doctor` tells how to get them)"
    say(f"To train: python {shlex.quote(str(given.out))} --data {data}")
    return 0


def export(recipe: Recipe) -> str:
    """The whole file."""
    fields = Fields(recipe)
    refuse_what_it_cannot(fields, recipe)
    template = TEMPLATE.read_text()
    # Every value that the template mentions, also where a switch is off and the value means nothing.
    known = {name: literal(fields[name]) for name in PLACE.findall(template) if name in fields}
    known |= values(fields, recipe)
    lines = chosen(template.splitlines(), switches(fields, recipe))
    text = PLACE.sub(lambda match: known[match[1]], "\n".join(lines))
    odd = fields.unread()
    if odd:
        name, value = next(iter(odd.items()))
        raise cannot(recipe, f"{name} is {value!r}, which the single file does not know")
    return tidy(text)


class Fields(dict[str, Any]):
    """Every field of a recipe under its dotted name; remembers which ones were read."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(fields_of(recipe))
        self.read = {"name", "track", "about"}
        self.defaults = fields_of(Recipe("", "", ""))

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def unread(self) -> dict[str, Any]:
        """Fields that nobody asked about although they are not what they usually are."""
        return {n: v for n, v in self.items() if n not in self.read and v != self.defaults[n]}


def cannot(recipe: Recipe, why: str) -> UserError:
    return UserError(
        f"Recipe {recipe.name!r} at {recipe.track} size cannot be a single file: {why}; "
        "choose another recipe, or the size of the pocket track."
    )


def refuse_what_it_cannot(f: Fields, recipe: Recipe) -> None:
    """Combinations that no recipe of the lineage has at pocket size, and that the template has no lines for."""
    windows = recipe.schedule.has_windows
    longest = max(f["schedule.length"], f["validation.length"])
    attends = set(range(f["model.layers"])) - set(f["model.no_attention"])
    values = dict(f["model.value_layers"])
    muon = f["optim.matrices"] != "adam"
    stack = 32 * f["model.layers"] * f["model.width"] ** 2  # bytes of the largest one, up and down projections
    crossing = f["model.smear"] or f["model.smear_mtp"] or f["model.key_offset"] or f["schedule.predict"] > 1
    reasons = {
        "loader.order": f["loader.order"] != "rows",
        "loader.tail": f["loader.tail"] != "split",
        "loader.packing": (f["loader.packing"] == "documents") != windows,
        "loader.max_document": windows and f["loader.max_document"] < longest,
        "schedule.length": windows and longest > SHORT_ROWS,
        "schedule.cooldown": not f["schedule.cooldown"],
        "schedule.predict_until": f["schedule.predict"] > 1 and not f["schedule.predict_until"],
        "schedule.window_cubic": f["schedule.window_cubic"] and (f["model.yarn"] or f["schedule.window_extension"]),
        "model.fp8_head": f["model.fp8_head"],
        "model.across_documents": windows and crossing and not f["model.across_documents"],
        "model.value_layers": bool(values) and set(values) != attends,
        "model.value_lambdas": f["model.value_lambdas"] and not values,
        "model.value_norm": f["model.value_norm"] and not values,
        "model.embed_std": own_head(f) and not f["model.embed_std"],
        "model.width": muon and stack > CHUNK_BYTES,
        "optim.every": f["optim.every"] > 2,
        "optim.weights": f["optim.weights"] == "bf16",
        "optim.snoo.k": f["optim.snoo.k"] and not muon,
        "optim.muon.method": muon and f["optim.muon.method"] not in COEFFICIENTS,
        "optim.muon.steps": muon and f["optim.muon.steps"] > 5,
        "optim.muon.scale": muon and f["optim.muon.scale"] == "match-rms-adamw",
    }
    for name, refused in reasons.items():
        if refused:
            raise cannot(recipe, f"{name} is {f[name]!r}, for which the single file has no code")


# -------------------------------------------------------------------- what a recipe uses


def own_head(f: Fields) -> bool:
    return not f["model.tied"] or f["model.split"]


def parts_of(recipe: Recipe) -> list[str]:
    """The parts that the model's parameters fall into."""
    return [part for part in PARTS if part in _parts(recipe.model)]


@functools.lru_cache(maxsize=4)
def _parts(config: Any) -> frozenset[str]:
    with torch.device("meta"):
        return frozenset(part_of(name) for name, _ in GPT(config, 1).named_parameters())


def switches(f: Fields, recipe: Recipe) -> dict[str, bool]:
    """Which `#: if` holds."""
    muon = f["optim.matrices"] != "adam"
    windows = recipe.schedule.has_windows
    softcap, scale, method = f["model.softcap"], f["optim.muon.scale"], f["optim.muon.method"]
    gates = [f[f"model.{name}"] for name in ("attention_gates", "value_gates", "smear", "skip_gates")]
    backout, skips = f["model.backout"] >= 0, bool(f["model.skips"])
    multipliers = {f[f"optim.muon.{name}"] for name in ("attention_lr", "up_lr", "down_lr")} != {1.0}
    muon_gates = muon and f["optim.muon.gates"]
    momentum = bool(f["schedule.momentum_warmup"] or f["schedule.momentum_cooldown"])
    on = {
        # the run
        "windows": windows,
        "long_forward": windows or f["schedule.predict"] > 1 or f["model.split"],
        "residual_depth": f["model.attention_residual"] == "depth",
        "plain_after": not f["model.split"] and not f["schedule.window_final"],
        "val_first": f["validation.first"],
        "slots": f["schedule.batch_ramp"] or f["schedule.window_ramp"],
        "predict": f["schedule.predict"] > 1,
        "split": f["model.split"],
        "momentum_schedule": muon and momentum,
        "constant_momentum": muon and not momentum,
        **{
            name: f[f"schedule.{name}"]
            for name in (
                "extension", "batch_ramp", "lr_ramp", "warmup", "floor", "window_ramp", "window_cubic",
                "window_extension", "window_final", "window_short", "momentum_warmup", "momentum_cooldown",
            )
        },
        # the model
        **{
            name: f[f"model.{name}"]
            for name in (
                "attention_scale", "no_attention", "skips", "embed_std", "mlp_init_scale", "yarn", "qk_norm",
                "attention_gates", "value_gates", "attention_lambdas", "value_lambdas", "value_norm", "key_offset",
                "second_embedding", "residual_lambdas", "x0_lambdas", "smear", "smear_mtp", "skip_gates", "zero_init",
                "embed_norm",
            )
        },
        "values": f["model.value_tables"],
        "any_gate": any(gates),
        "backout": backout,
        "backout_subtract": backout and f["model.backout_form"] == "subtract",
        "backout_mix": backout and f["model.backout_form"] == "mix",
        "outputs": backout or skips,
        "per_layer_numbers": skips or f["model.residual_lambdas"] or f["model.x0_lambdas"],
        "x0": f["model.x0_lambdas"] or f["model.skip_gates"],
        "previous": f["model.smear"] or f["model.smear_mtp"] or f["model.key_offset"],
        "skip_sigmoid": f["model.skip_form"] == "sigmoid",
        "rotary_half": f["model.rotary"] == "half",
        "gelu": f["model.activation"] == "gelu",
        "own_head": own_head(f),
        "zero_head": own_head(f) and f["model.zero_init"],
        "softcap": softcap != "none",
        **{f"softcap_{form}": softcap == form for form in ("sigmoid", "isru", "tanh")},
        "safe_logits": softcap != "none" and f["model.softcap_limit"] <= SAFE_LIMIT,
        # the optimizers
        "every": f["optim.every"] > 1,
        "eps_uncorrected": f["optim.eps_at"] == "uncorrected",
        "adam_cautious": f["optim.decay"] == "cautious" and f["optim.weight_decay"],
        "adam_lr_squared": f["optim.decay_by"] == "lr-squared",
        "exact": f["optim.weights"] == "exact-bf16",
        "snoo": f["optim.snoo.k"],
        "muon": muon,
        "normuon": f["optim.matrices"] == "normuon",
        "muon_gates": muon_gates,
        "muon_multipliers": muon and multipliers,
        "slot_lr": muon and (multipliers or (muon_gates and f["optim.muon.gates_lr"] != 1.0)),
        "gates_lr": muon_gates and (multipliers or f["optim.muon.gates_lr"] != 1.0),
        "head_gates": "gates" in parts_of(recipe),
        "scalars": "scalars" in parts_of(recipe),
        "muon_names": f["optim.muon.split_qkv"] or multipliers or muon_gates,
        "muon_decay": muon and f["optim.muon.weight_decay"],
        "muon_cautious": f["optim.muon.decay"] == "cautious",
        "muon_lr_squared": f["optim.muon.decay_by"] == "lr-squared",
        "split_qkv": f["optim.muon.split_qkv"],
        "classical": f["optim.muon.momentum_form"] == "classical",
        "update_ema": muon and f["optim.muon.update_ema"],
        "scaled": scale != "none",
        "scale_spectral": scale == "spectral",
        "scale_unit": scale == "unit-variance",
        **{name.replace("-", "_"): method == name for name in COEFFICIENTS},
    }  # fmt: skip
    return {name: bool(value) for name, value in on.items()}


def values(f: Fields, recipe: Recipe) -> dict[str, str]:
    """What stands between << and >>, beside the fields themselves."""
    with_values, windows = bool(f["model.value_tables"]), recipe.schedule.has_windows
    parameters = ["self", "x_BTD: Tensor", *["value_BTD: Tensor"] * with_values, "cos: Tensor", "sin: Tensor"]
    parameters += ["masks: list[Tensor]"] * windows
    given = ["norm(x, NORM_EPS)" if f["model.attention_norm"] else "x"]
    given += ["values[block.attention.value_table]"] * with_values + ["cos", "sin"] + ["masks"] * windows
    depth = f["model.attention_residual"] == "depth"
    call = f"block.attention({', '.join(given)})" + " * (1 / math.sqrt(2 * LAYERS))" * depth
    ramp = bool(f["schedule.lr_ramp"])
    shape = ["s.rows", *["s.tied"] * f["model.split"], *["len(s.predict)"] * (f["schedule.predict"] > 1)]
    multiplied = switches(f, recipe)["slot_lr"]
    slot = ["blocks"] * f["optim.muon.split_qkv"] + ["multiplier(name)"] * multiplied + ["zeros"]
    slot += ["torch.zeros_like(p, dtype=torch.int16)"] * (f["optim.weights"] == "exact-bf16")
    slot += ["zeros.clone()"] * bool(f["optim.muon.update_ema"])
    counted = with_values or windows  # whether attention must know in which layer it is
    numbered = counted or bool(f["model.no_attention"])
    return {
        "title": f"`{recipe.name}`",
        "recipe": recipe.name,
        "track": recipe.track,
        "about": recipe.about[0].upper() + recipe.about[1:],
        "mlp_width": literal(int(f["model.mlp_ratio"] * f["model.width"])),
        "model.norm_eps": "2.0**-23" if f["model.norm_eps"] == 2.0**-23 else literal(f["model.norm_eps"]),
        "value_layers": literal(dict(f["model.value_layers"])),
        "attention_parameters": ", ".join(parameters),
        "attention_call": call,
        "attention_init": "self, layer: int" if counted else "self",
        "attention_layer": "layer" if counted else "",
        "block_init": "self, layer: int" if numbered else "self",
        "blocks": "Block(layer) for layer" if numbered else "Block() for _",
        "per_layer": "2" if f["model.second_embedding"] else "1",
        "skip_start": "-1.5" if f["model.skip_form"] == "sigmoid" else "1.0",
        "backout_start": "[0.5]" if f["model.backout_form"] == "subtract" else "[1.0, 0.0]",
        "adam": "\n".join(adam_table(f, recipe)),
        "tables": literal(tuple(p for p in parts_of(recipe) if p in WHOLE)).replace("'", '"'),
        "coefficients": coefficients(f["optim.muon.method"], f["optim.muon.steps"]),
        "slot": ", ".join(slot),
        "slot_rate": "(lr * slot.lr)" if multiplied else "lr",
        "floor_name": "FLOOR" if f["schedule.floor"] else "0.0",
        "peak": "peak" if ramp else "1.0",
        "peak_times": "peak * " if ramp else "",
        "left": "peak * ((self.steps - step) / fall)" if ramp else "(self.steps - step) / fall",
        "shape": shape[0] if len(shape) == 1 else f"({', '.join(shape)})",
    }


def adam_table(f: Fields, recipe: Recipe) -> list[str]:
    """A line for each part of the model that Adam trains: products are left as such, so that one sees what they are."""
    muon = ["blocks"] * (f["optim.matrices"] != "adam")
    muon += ["gates", "smear_gate"] * bool(muon and f["optim.muon.gates"])
    lines = []
    for part in PARTS:
        own = {name: f[f"optim.{part}.{name}"] for name in ("lr", "beta1", "beta2", "decay")}
        if part in muon or part not in parts_of(recipe):
            continue
        betas = [f[f"optim.{name}"] if own[name] == -1 else own[name] for name in ("beta1", "beta2")]
        products = (f["optim.lr"], own["lr"]), (f["optim.weight_decay"], own["decay"])
        lr, decay = (literal(base) if factor == 1 else f"{base!r} * {factor!r}" for base, factor in products)
        decay = "0.0" if not own["decay"] or not f["optim.weight_decay"] else decay
        lines.append(f'    "{part}": Rates({lr}, {betas[0]!r}, {betas[1]!r}, {decay}),')
    return lines


def coefficients(method: str, steps: int) -> str:
    triples = list(COEFFICIENTS.get(method, POLAR_EXPRESS))[:steps]
    if len(triples) == 1:
        return f"({triples[0]},) * {steps}"
    triples += triples[-1:] * (steps - len(triples))
    return "\n".join(["(", *(f"    {triple}," for triple in triples), ")"])


def literal(value: Any) -> str:
    """As Python source, in the quotes that the formatter wants."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


# -------------------------------------------------------------------- the template


def chosen(lines: list[str], on: dict[str, bool]) -> list[str]:
    """The lines that the orders leave, and the sources they ask for."""
    kept: list[str] = []
    open_ifs: list[bool] = []
    for number, line in enumerate(lines, 1):
        if not line.startswith("#:"):
            if all(open_ifs):
                kept.append(line)
            continue
        order, *words = line.removeprefix("#:").split()
        if order == "if":
            open_ifs.append(on[words[-1]] != (words[0] == "not"))
        elif order == "else":
            open_ifs[-1] = not open_ifs[-1]
        elif order == "end":
            open_ifs.pop()
        elif order == "source":
            if all(open_ifs):
                kept += definitions(words[0], words[1:])
        else:
            raise ValueError(f"{TEMPLATE.name}, line {number}: unknown order {order!r}")
    assert not open_ifs, "an `#: if` has no end"
    return kept


def definitions(file: str, names: list[str]) -> list[str]:
    """Functions, classes and assignments of a module of the package, with the comments above them."""
    lines = (PACKAGE / file).read_text().splitlines()
    found: dict[str, ast.stmt] = {}
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {n.id: node for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    taken: list[str] = []
    for name in names:
        node = found[name]
        assert node.end_lineno is not None
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        while lines[start - 1].startswith("#"):
            start -= 1
        taken += ["", "", *lines[start : node.end_lineno]] if hasattr(node, "body") else lines[start : node.end_lineno]
    return taken


def tidy(text: str) -> str:
    """Blank lines as the formatter wants them: two around what is defined at the top, at most one inside."""
    docstring, rest = text.split('"""\n', 1)
    tidied: list[str] = []
    blanks, before = 0, ""
    for line in rest.splitlines():
        if not line.strip():
            blanks += 1
            continue
        ended = before.startswith(" ") and line[0] not in " )]}"  # a definition
        begins = line.startswith(("def ", "class ", "@")) and not before.startswith(("@", "#"))
        if line[0] == " ":
            blanks = 0 if before.endswith(":") else min(blanks, 1)
        else:
            blanks = 2 if ended or begins else min(blanks, 2)
        tidied += [""] * (blanks if tidied else 0) + [line]
        blanks, before = 0, line
    return f'{docstring}"""\n\n' + "\n".join(tidied) + "\n"
