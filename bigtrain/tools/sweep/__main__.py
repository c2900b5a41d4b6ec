"""Runs `python -m bigtrain.tools.sweep`."""

import sys

from bigtrain.tools.sweep import sweep

if __name__ == "__main__":
  sys.exit(sweep.main())
