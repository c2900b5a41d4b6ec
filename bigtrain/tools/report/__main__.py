"""Runs `python -m bigtrain.tools.report`."""

import sys

from bigtrain.tools.report import report

if __name__ == "__main__":
  sys.exit(report.main())
