"""`python -m bigtrain`: help, the version, and lists of what a config can name.

python -m bigtrain --help
python -m bigtrain --version
python -m bigtrain list tasks
python -m bigtrain list ops tokenize
"""

import sys

from bigtrain.tools import overview

if __name__ == "__main__":
  sys.exit(overview.main())
