"""The stress tool, for a short while."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "stress.py"


def test_four_processes_at_random_work_never_see_a_wrong_answer_and_lose_nothing() -> None:
    environment = {**os.environ, "PYTHONPATH": str(TOOL.parents[1])}
    command = [sys.executable, str(TOOL), "--seconds", "10", "--workers", "4"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    figures = dict(line.rsplit(maxsplit=1) for line in ended.stdout.splitlines())
    for figure in ("operations", "checked", "evicted", "duplicates", "hits"):
        assert int(figures[figure].replace(",", "")) > 100, ended.stdout
