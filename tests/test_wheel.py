"""The wheel holds all that training needs: installed in a fresh environment, away from the sources, it trains."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import make_token_folder

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(ROOT)]
    subprocess.run(command, check=True, timeout=240)
    (built,) = out.glob("speedrun-*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert inside == {name.removeprefix("src/") for name in tracked.split()}


@pytest.mark.slow
def test_the_wheel_trains_five_steps_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """Of the packages that it depends on only the installation is left out: they are those of this environment."""
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env" / "bin" / "python")
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    installed = [p for p in sys.path if p.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(installed))
    target = ["--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "install", *target], check=True, timeout=240)
    data = make_token_folder(tmp_path / "tokens").path
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HOME": str(tmp_path)}
    where = subprocess.run(
        [python, "-c", "import speedrun; print(speedrun.__file__)"],
        env=clean,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert where.startswith(str(site))
    flags = ["--data", str(data), "--target", "9", "--steps", "5", "--no-compile", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [python, "-m", "speedrun", "train", "--recipe", "adamw", "--dtype", "float32", *flags],
        env=clean, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.json").exists()
