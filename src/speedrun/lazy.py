"""Packages that offer names of their modules, and load a module when a name of it is first used.

    if TYPE_CHECKING:
        from speedrun.api import load, train
    else:
        __getattr__, __all__ = lazy(__name__)

Type checkers read the imports; at run time `lazy` reads them in the source and carries them out one by one.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """`__getattr__` and `__all__` of a package, from the imports in its `if TYPE_CHECKING`."""
    tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    found = {alias.asname or alias.name: (str(node.module), alias.name) for node in imports for alias in node.names}

    def __getattr__(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, own_name = found[name]
        if module == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(module), own_name)

    return __getattr__, sorted(found)
