"""The examples with a real model: needs `pip install '.[examples]'`, and is skipped without."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import remove_all

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = "--workers", "2", "--conversations", "2", "--turns", "3"

pytestmark = pytest.mark.skipif(
    not (find_spec("torch") and find_spec("transformers")), reason="needs torch and transformers: '.[examples]'"
)


@pytest.mark.parametrize("name", ["serve_llama", "serve_hybrid"])
def test_a_shared_cache_computes_least_and_changes_no_token(name: str) -> None:
    example = subprocess.Popen([sys.executable, EXAMPLES / f"{name}.py", *SMALL], stdout=subprocess.PIPE, text=True)
    try:
        output, _ = example.communicate(timeout=300)
    finally:
        example.kill()
        for number in range(2):
            remove_all(f"{name}-{example.pid}-{number}")
    computed = {kind: int(count) for kind, count in re.findall(r"^(\w+) +(\d+) ", output.replace(",", ""), re.M)}
    assert example.returncode == 0, output
    assert computed["none"] > computed["private"] > computed["shared"], output
