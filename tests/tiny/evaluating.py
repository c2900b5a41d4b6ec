"""Builds evaluators for tests in the same way as the program."""

from bigtrain import sharding
from bigtrain.config import lengths, settings
from bigtrain.evaluation import evaluations
from bigtrain.reports import media


def context(**changes):
  """Returns a context on a mesh of all devices, with batches of 8."""
  values = dict(
    name="val",
    workdir="",
    mesh=sharding.make_mesh(),
    batch_size=8,
    pp_modules=(),
    progress=lambda done, batches: None,
  )
  return evaluations.Context(**values | changes)


def build(kind, predict_fn, of=None, **options):
  """Builds an evaluator from an entry of config.evals.

  Args:
    kind: the entry's `type`.
    predict_fn: the predict function.
    of: context; its name is the entry's key.
    **options: options of the entry.
  """
  of = of or context()
  entry = dict(type=kind, pred="predict_fn", **options)
  (evaluation,) = evaluations.from_config(
    settings.Config({"evals": {of.name: entry}}),
    {"predict_fn": predict_fn},
    lengths.Units(batch_size=of.batch_size, total_steps=100),
    of,
    {"params": of.variables},
  )
  return evaluation.build()


def save(results, workdir, step):
  """Writes the files of an evaluator's results; returns them as in a row."""
  row, shown = media.split({"step": step, **results})
  media.save(str(workdir), step, shown)
  del row["step"]
  return row
