"""launch/kubernetes.yaml is a JobSet, field by field."""

import pathlib

import pytest
import yaml

FILE = pathlib.Path(__file__).parent.parent.parent / "launch/kubernetes.yaml"

pytestmark = pytest.mark.cluster


def unknown(given, understood, path=""):
  """Paths of what is given but not understood."""
  if isinstance(given, dict):
    for key, value in given.items():
      if key not in understood:
        yield f"{path}.{key}"
      else:
        yield from unknown(value, understood[key], f"{path}.{key}")
  elif isinstance(given, list):
    for i, (one, other) in enumerate(zip(given, understood, strict=True)):
      yield from unknown(one, other, f"{path}[{i}]")
  elif given != understood:
    yield path


def check(text):
  """Raises ValueError if it is not a JobSet with jobs with pods."""
  models = pytest.importorskip(
    "kubeflow_trainer_api.models",
    reason="pip install 'bigtrain[cluster]': its models are those of the "
    "JobSet's API and of Kubernetes' own",
  )
  given = yaml.safe_load(text)
  # Raises for wrong types and values, and leaves out what is not in the API.
  understood = models.JobsetV1alpha2JobSet.from_dict(given).to_dict()
  if wrong := list(unknown(given, understood)):
    raise ValueError(f"unknown: {', '.join(wrong)}")


def test_it_is_valid():
  check(FILE.read_text())


@pytest.mark.parametrize(
  "right, wrong",
  [
    ("maxRestarts:", "maxRestart:"),
    ("replicas: 1", "replicas: one"),
    ("completionMode:", "completionmode:"),
    ("operator: In", "operator: in"),
    ("restartPolicy: Never", "restartPolicy: never"),
    ("terminationGracePeriodSeconds:", "terminationGracePeriodSecs:"),
    ("image:", "imag:"),
    ("claimName:", "claim:"),
  ],
)
def test_a_mistake_would_be_found(right, wrong):
  text = FILE.read_text()
  assert right in text
  with pytest.raises(ValueError):
    check(text.replace(right, wrong, 1))
