"""Damages images of small segments in every way, opens each, makes every call, and says what must not be.

Forbidden are a crash, a hang, memory without bounds, an error that is not one of shmradix's, and a match that the
image does not hold. Exit status 1 where one came up; its image is made again by `--seed S --first N --images 1`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import hostile


def main() -> int:
    """Run, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000, help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random ones and of the order (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (default %(default)s)")
    parser.add_argument("--lanes", type=int, default=2, help="processes at once (default %(default)s)")
    options = parser.parse_args()
    report = hostile.run(options.images, options.seed, options.first, options.lanes)
    print(report)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
