"""``python -m kvxfer.connectors.trtllm [MODEL]``: checks whether the connector fits the installed engine."""

from __future__ import annotations

import sys

from kvxfer.connectors.trtllm.engine_check import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
