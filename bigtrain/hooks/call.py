"""Calls a user's function for every log entry."""

from collections.abc import Mapping
from typing import Any

from bigtrain.config.modules import find_attribute
from bigtrain.runtime.hook_context import Context


class Hook:
  """Calls a user's function for every log entry.

  Args:
    function: dotted path of a function (step, entry, **kwargs) that returns
      None, or a reason to stop the run.
  """

  def __init__(self, function: str, *, context: Context, **kwargs: Any):
    self._function = find_attribute(function, f"{context.path}.function")
    self._kwargs, self._context = kwargs, context

  def after_row(self, step: int, entry: Mapping[str, Any]) -> None:
    if reason := self._function(step, entry, **self._kwargs):
      self._context.stop(reason)
