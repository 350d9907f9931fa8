"""The program in docs/optimizers.md runs as printed, and learns."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"


def test_the_example_runs() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(program.strip().splitlines()) <= 20
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.0  # from log(256) = 5.5; the text repeats, so it can be learned by heart


def test_the_pictures_are_there() -> None:
    for picture in re.findall(r"\]\((images/[^)]+)\)", PAGE.read_text()):
        assert (PAGE.parent / picture).read_text().startswith("<?xml")
