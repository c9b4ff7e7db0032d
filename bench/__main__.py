"""``python -m kvxfer.bench pages …`` is ``kvxfer bench pages …``."""

import sys

from kvxfer.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
