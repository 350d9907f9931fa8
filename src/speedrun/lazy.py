"""Packages that offer names of their modules and load a module when a name of it is first used.

    if TYPE_CHECKING:
        from speedrun.api import load, train

    __all__ = ["load", "train"]
    __getattr__ = lazy(__name__)

Type checkers read the imports; `lazy` carries them out one by one.
"""

import ast
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package, from the imports in its source."""

    def __getattr__(name: str) -> Any:
        module = imports_of(package).get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if module == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(module), name)

    return __getattr__


@functools.cache
def imports_of(package: str) -> dict[str, str]:
    """{name: the module that it is imported from}"""
    tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in found for alias in node.names}
