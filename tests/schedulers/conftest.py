"""Ends daemons and jobs when the test session is terminated."""

import signal


def pytest_sessionstart():
  """Makes SIGTERM act like Ctrl-C, so that fixtures are torn down."""
  signal.signal(signal.SIGTERM, signal.default_int_handler)
