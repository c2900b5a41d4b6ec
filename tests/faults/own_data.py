"""A user's source with fewer examples on process 1 of a job."""

import jax

from bigtrain.data import arrays


class Source(arrays.Source):
  """The arrays of a file; on process 1, only the first eight examples."""

  def __init__(self, path):
    super().__init__(path, slice="[:8]" if jax.process_index() == 1 else "")
