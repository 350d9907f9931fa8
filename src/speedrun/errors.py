"""Exceptions that the command line turns into one sentence. Anything else that escapes is a bug, with its traceback.

`UserError` is a person's mistake: `speedrun: <sentence>` and exit code 2.
"""

import difflib
import os
from collections.abc import Iterable


class UserError(ValueError):
    """One sentence that names the offending value and the way out."""

    mine_to_tell: bool | None = None
    """Of several ranks, whether this one prints it; None: the first one on each machine does."""


def speaks(error: UserError) -> bool:
    """Whether this rank tells it: of those who met an error together one does, elsewhere one on each machine."""
    if error.mine_to_tell is not None:
        return error.mine_to_tell
    return "RANK" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0"


class OtherVersion(UserError):
    """A stored file that is whole, but written by a version of the program that knew more."""


class RankLost(Exception):
    """Another rank is gone or stuck; the message says which one, where it was, and why as far as that is known."""

    told = False


class Terminated(KeyboardInterrupt):
    """SIGTERM."""


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean X?' when something known looks like `name`; otherwise ' Known: ...'."""
    known = list(known)
    return similar(name, known) or f" Known: {', '.join(sorted(known))}."


def similar(name: str, known: Iterable[str]) -> str:
    """' Did you mean X?' when something known looks like `name`; otherwise nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
