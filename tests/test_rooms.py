"""The house has rooms, and data walks through them one way: a lower room never imports a higher one."""

import ast
import importlib
import inspect
import sys
from pathlib import Path

import pytest

import speedrun

PACKAGE = Path(speedrun.__file__).parent

# Each room may import itself, torch and friends, and the rooms named here.
MAY_IMPORT = {
    "errors": set(),
    "lazy": set(),
    "templates": set(),
    "arguments": {"checks"},
    "checks": {"errors"},
    "files": {"errors"},
    "optim": set(),
    "data": {"lazy", "errors", "checks", "files"},
    "model": {"lazy", "errors", "checks"},
    "tracks": {"errors", "files", "data"},
    "training": {"lazy", "errors", "checks", "files", "data", "model", "optim", "tracks"},
    "recipes": {"errors", "files", "data", "model", "optim", "tracks", "training"},
    "sample": {"errors", "data", "model", "training"},
    "doctor": {"errors", "files", "data", "model", "tracks", "training"},
    "gpu_report": {"errors", "files", "templates", "data", "model", "optim", "training", "doctor"},
    "api": {"errors", "checks", "data", "experiments", "model", "recipes", "sample", "tracks", "training"},
    "experiments": {"lazy", "errors", "arguments", "checks", "files", "templates", "tracks", "training", "recipes"},
    "report": {
        "lazy",
        "errors",
        "files",
        "templates",
        "model",
        "optim",
        "tracks",
        "training",
        "recipes",
        "experiments",
    },
}


def imports_of(file: Path) -> set[str]:
    """Top-level names below `speedrun` that a file imports, and the outside packages as themselves."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} uses a relative import"
            assert node.module is not None
            modules = [node.module]
            if node.module == "speedrun":
                modules = [f"speedrun.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            found.add(f"speedrun.{parts[1]}" if parts[0] == "speedrun" and len(parts) > 1 else parts[0])
    return found


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_no_room_imports_a_higher_one() -> None:
    for file in PACKAGE.rglob("*.py"):
        room = room_of(file)
        if room in ("cli", "__init__", "__main__"):
            continue
        inside = {name.removeprefix("speedrun.") for name in imports_of(file) if name.startswith("speedrun.")}
        assert inside <= MAY_IMPORT[room] | {room}, f"{file} imports {inside - MAY_IMPORT[room] - {room}}"


FACES = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"cli", "templates"}


def past_a_face(file: Path, room: str) -> list[str]:
    """Imports of another room that are not among the names that its `__init__` offers."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            named = [(alias.name.split("."), None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            named = [(node.module.split("."), alias.name) for alias in node.names]
        else:
            continue
        for parts, name in named:
            if parts[0] != "speedrun" or len(parts) < 2 or parts[1] == room or parts[1] not in FACES:
                continue
            offered = importlib.import_module(f"speedrun.{parts[1]}").__all__
            if len(parts) > 2 or name not in offered:
                found.append(f"{file}:{node.lineno} {'.'.join(parts)} {name or ''}")
    return found


def test_no_room_reaches_past_the_face_of_another() -> None:
    """Tests, benchmarks and scripts may: they look into the rooms on purpose."""
    files = sorted(PACKAGE.rglob("*.py"))
    assert [line for file in files for line in past_a_face(file, room_of(file))] == []


@pytest.mark.parametrize("room", sorted(FACES))
def test_a_face_offers_what_it_names(room: str) -> None:
    face = importlib.import_module(f"speedrun.{room}")
    offered = {name: getattr(face, name) for name in face.__all__}
    assert offered
    for name, value in offered.items():  # a function of the name of its module would be hidden by that
        assert inspect.ismodule(value) == (value is sys.modules.get(f"speedrun.{room}.{name}")), name


def test_an_import_past_a_face_is_found(tmp_path: Path) -> None:
    file = tmp_path / "new.py"
    file.write_text(
        "from speedrun.training.step import Trainer\nimport speedrun.model.gpt\nfrom speedrun.data import _secret\n"
        "from speedrun.optim import Adam\nfrom speedrun.errors import UserError\n"
    )
    assert [line.split(":")[1] for line in past_a_face(file, "cli")] == [
        "1 speedrun.training.step Trainer",
        "2 speedrun.model.gpt ",
        "3 speedrun.data _secret",
    ]


def test_the_optimizers_can_be_lifted_out() -> None:
    standard = {
        "abc",
        "collections",
        "contextlib",
        "copy",
        "dataclasses",
        "fnmatch",
        "functools",
        "time",
        "itertools",
        "math",
        "typing",
        "warnings",
        "weakref",
    }
    for file in (PACKAGE / "optim").rglob("*.py"):
        outside = {name for name in imports_of(file) if not name.startswith("speedrun")}
        assert outside <= standard | {"torch"}, f"{file} imports {outside}"


FUNCTION, FILE, PARAMETERS = 60, 500, 7


def too_long(file: Path) -> list[str]:
    """Every function that is longer than one screen or takes more than anybody remembers, and every file too long."""
    text, found = file.read_text(), []
    if (lines := text.count("\n")) > FILE:
        found.append(f"{file}: {lines} lines")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
            where = f"{file}:{node.lineno} {node.name}"
            found += [f"{where}: {lines} lines"] if lines > FUNCTION else []
            found += [f"{where}: {len(names)} positional parameters"] if len(names) > PARAMETERS else []
    return found


def test_functions_and_files_are_short() -> None:
    assert [line for file in sorted(PACKAGE.rglob("*.py")) for line in too_long(file)] == []


def test_what_is_too_long_is_found(tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    file.write_text("def f(a, b, c, d, e, f, g, h):\n" + "    pass\n" * 60 + "\n" * 440)
    assert [line.split(" ", 1)[1] for line in too_long(file)] == [
        "501 lines",
        "f: 61 lines",
        "f: 8 positional parameters",
    ]
