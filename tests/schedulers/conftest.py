"""A session that is told to end cleans up: what it started ends with it."""

import signal


def pytest_sessionstart():
  """SIGTERM is as Ctrl-C, after which fixtures are torn down."""
  signal.signal(signal.SIGTERM, signal.default_int_handler)
