"""Exceptions that the command line turns into one sentence. Anything else that escapes is a bug, with its traceback.

`UserError` is a person's mistake: `speedrun: <sentence>` and exit code 2.
"""

import difflib
import os
import time
from collections.abc import Iterable

PRECEDENCE = 10.0  # seconds


class UserError(ValueError):
    """One sentence that names the offending value and the way out."""

    mine_to_tell: bool | None = None
    """Of several ranks, whether this one prints it; None: they had not met yet."""


def speaks(error: UserError) -> bool:
    """Whether this rank tells it. Before ranks have met, the first one on each machine tells what all of them find."""
    if error.mine_to_tell is None and "RANK" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(PRECEDENCE)  # if the first one finds it, too, torchrun ends this one meanwhile
    return error.mine_to_tell is not False


class OtherVersion(UserError):
    """A stored file that is whole, but of another version of the program."""


class Terminated(KeyboardInterrupt):
    """SIGTERM."""


def plural(count: int, noun: str) -> str:
    """'1 step', '2,000 steps'."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean X?' when something known looks like `name`; otherwise ' Known: ...'."""
    known = list(known)
    return similar(name, known) or f" Known: {', '.join(sorted(known))}."


def similar(name: str, known: Iterable[str]) -> str:
    """' Did you mean X?' when something known looks like `name`; otherwise nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
