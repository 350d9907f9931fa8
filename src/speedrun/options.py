"""How options of commands are declared, wherever the command is."""

from typing import Any

import tyro


def unset(kind: str, **more: Any) -> Any:
    """An option that may be left out: its help names the kind of value, and says itself what happens without."""
    return tyro.conf.arg(metavar=kind, help_behavior_hint="", **more)
