"""A person's mistake, told in one sentence.

`UserError` is the only exception that the command line turns into `speedrun: <sentence>` and exit code 2.
Anything else that escapes is a bug, and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """One sentence that names the offending value and the way out."""


class OtherVersion(UserError):
    """A stored file that is whole, but written by a version of the program that knew more."""


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean X?' when something known looks like `name`; otherwise ' Known: ...'."""
    known = list(known)
    return similar(name, known) or f" Known: {', '.join(sorted(known))}."


def similar(name: str, known: Iterable[str]) -> str:
    """' Did you mean X?' when something known looks like `name`; otherwise nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
