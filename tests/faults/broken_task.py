"""A user's task that cannot be imported."""

import a_missing_package  # noqa: F401
