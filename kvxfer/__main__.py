"""``python -m kvxfer …`` is ``kvxfer …``."""

import sys

from kvxfer.cli import main

sys.exit(main())
