"""The house has rooms, and data walks through them one way: a lower room never imports a higher one."""

import ast
from pathlib import Path

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
    "data": {"errors", "checks", "files"},
    "model": {"errors", "checks"},
    "tracks": {"errors", "files", "data"},
    "training": {"errors", "checks", "files", "data", "model", "optim", "tracks"},
    "recipes": {"errors", "files", "data", "model", "optim", "tracks", "training"},
    "sample": {"errors", "data", "model", "training"},
    "doctor": {"errors", "files", "data", "model", "tracks", "training"},
    "gpu_report": {"errors", "files", "templates", "data", "model", "optim", "training", "doctor"},
    "api": {"errors", "checks", "data", "experiments", "model", "recipes", "sample", "tracks", "training"},
    "experiments": {"errors", "arguments", "checks", "files", "templates", "tracks", "training", "recipes"},
    "report": {
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
