"""``python -m fedfm``: the command line."""

import sys

from fedfm.cli import main

sys.exit(main())
