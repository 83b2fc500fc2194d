"""``python -m husky_mlx CMD`` is the same as ``husky CMD``."""

import sys

from husky_mlx.cli import main

if __name__ == "__main__":
    sys.exit(main())
