"""scripts/same_bits.py: its cases leave nothing out, and a changed constant is caught."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def same_bits(*args: object) -> tuple[int, str, str]:
    command = [sys.executable, SCRIPTS / "same_bits.py", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_every_field_and_word_of_a_recipe_is_used_by_some_case() -> None:
    """A new switch needs a case: most simply, one more line in MORE."""
    spec = importlib.util.spec_from_file_location("bits_cases", SCRIPTS / "bits_cases.py")
    assert spec is not None
    assert spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    assert cases.unused() == []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    root = SCRIPTS.parent
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(root / "src", tmp_path / "copy" / "src", ignore=ignored)
    shutil.copytree(root / "scripts", tmp_path / "copy" / "scripts", ignore=ignored)
    return tmp_path / "copy"


def test_the_same_code_has_the_same_bits_and_one_constant_changes_them(copy: Path) -> None:
    """The constant acts late: the learning rate in the cooldown."""
    code, out, _ = same_bits(SCRIPTS.parent, copy, "--quick", "--only", "adamw")
    assert (code, out.splitlines()[0], out.splitlines()[-1]) == (0, "1 process, adamw: equal", "same bits")
    schedule = copy / "src" / "speedrun" / "training" / "schedule.py"
    schedule.write_text(
        schedule.read_text().replace("left = (self.steps - step) / fall", "left = (self.steps - step) / fall * 0.99")
    )
    code, out, _ = same_bits(SCRIPTS.parent, copy, "--quick", "--only", "adamw")
    assert code == 1
    assert out.startswith("1 process, adamw: loss 8 of 11 is 0x")
    assert out.endswith("NOT the same bits: 1 difference\n")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["no-such-commit", "."], "same_bits: there is no commit or folder 'no-such-commit'"),
        ([".", "tests"], "same_bits: tests has no src/speedrun; name a commit of this repository, or a checkout."),
        (
            [".", ".", "--quick", "--only", "adam"],
            "same_bits: .: bits_cases.py: error: there is no case 'adam'; there are gpt2, adamw",
        ),
    ],
)
def test_mistakes_are_told(args: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SCRIPTS.parent)
    code, out, err = same_bits(*args)
    assert (code, out) == (2, "")
    assert err.startswith(says), err
