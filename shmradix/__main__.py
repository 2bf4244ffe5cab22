"""`python -m shmradix` is the command `shmradix`."""

import sys

from shmradix.cli import main

if __name__ == "__main__":
    sys.exit(main())
