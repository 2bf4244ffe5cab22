"""What the README shows is what happens."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import fresh_name, remove_all

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    name = fresh_name()
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    expected = re.findall(r"prints\n\n((?:    .*\n)+)", README)[0]
    script = tmp_path / "example.py"
    script.write_text(example.replace('"llm"', repr(name)))
    try:
        done = subprocess.run(
            [sys.executable, script],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    finally:
        remove_all(name)
    assert done.stdout.split() == expected.split()


def test_every_file_that_the_readme_links_to_is_there() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).is_file(), link
