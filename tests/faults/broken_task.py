"""A user's task that cannot be imported."""

import a_package_that_is_not_there  # noqa: F401
