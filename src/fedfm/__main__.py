"""``python -m fedfm``: the command line."""

import sys

from fedfm.cli import main

if __name__ == "__main__":
    sys.exit(main())
