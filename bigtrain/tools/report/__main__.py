"""Runs `python -m bigtrain.tools.report`."""

import sys

from bigtrain.tools.report import report

sys.exit(report.main())
