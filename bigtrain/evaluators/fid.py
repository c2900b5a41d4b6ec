"""Distance between two sets of images: FID (arXiv 1706.08500)."""

from collections.abc import Mapping
from typing import Any

from bigtrain.arrays.types import PredictFn, Variables
from bigtrain.evaluation import features, frechet
from bigtrain.evaluation.evaluations import Batches


class Evaluator:
  """Frechet distance "fid" between Gaussians fitted to two sets of features.

  It is the FID of the literature if the features come from the literature's
  Inception network. It is NaN if features are not finite. `sample_fid` compares
  samples of a generator with images.

  Args:
    predict_fn: (variables, batch) -> features [B, ...], or a dict of them; then
      the results are "<layer>/fid".
    reference_data: source of the other set, preprocessed in the same way.
  """

  def __init__(
    self,
    predict_fn: PredictFn,
    batches: Batches,
    *,
    reference_data: Mapping[str, Any],
  ):
    reference = batches.replace(data=reference_data, num_examples=None)
    self._own = features.moments_of_all(predict_fn, batches)
    self._reference = features.moments_of_all(predict_fn, reference)

  def run(self, variables: Variables, step: int) -> dict[str, float]:
    own, others = self._own(variables), self._reference(variables)
    results = {
      f"{name}/fid" if name else "fid": frechet.distance(x, others[name])
      for name, x in own.items()
    }
    return results | frechet.nonfinite(*own.values(), *others.values())
