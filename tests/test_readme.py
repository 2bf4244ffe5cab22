"""What the README and the guide show is what happens."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import fresh_name, remove_all

ROOT = Path(__file__).parent.parent
TEXTS = {name: (ROOT / name).read_text() for name in ("README.md", "docs/guide.md")}


@pytest.mark.parametrize("text", TEXTS)
def test_the_example_prints_what_the_text_says(tmp_path: Path, text: str) -> None:
    name = fresh_name()
    example = re.findall(r"```python\n(.*?)```", TEXTS[text], re.DOTALL)[0]
    expected = re.findall(r"prints\n\n((?:    .*\n)+)", TEXTS[text])[0]
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


@pytest.mark.parametrize("text", TEXTS)
def test_every_file_that_the_text_links_to_is_there(text: str) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", TEXTS[text]):
        assert (ROOT / text).parent.joinpath(link).is_file(), link
