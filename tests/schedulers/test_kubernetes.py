"""launch/kubernetes.yaml is a valid JobSet."""

import pathlib

import pytest
import yaml

FILE = pathlib.Path(__file__).parent.parent.parent / "launch/kubernetes.yaml"

pytestmark = pytest.mark.cluster


def unknown_paths(content, parsed, path=""):
  """Paths of the values in `content` that are missing in `parsed`."""
  if isinstance(content, dict):
    for key, value in content.items():
      if key not in parsed:
        yield f"{path}.{key}"
      else:
        yield from unknown_paths(value, parsed[key], f"{path}.{key}")
  elif isinstance(content, list):
    for i, (one, other) in enumerate(zip(content, parsed, strict=True)):
      yield from unknown_paths(one, other, f"{path}[{i}]")
  elif content != parsed:
    yield path


def check(text):
  """Raises ValueError if the text is not a JobSet with jobs and pods."""
  models = pytest.importorskip(
    "kubeflow_trainer_api.models",
    reason="pip install 'bigtrain[cluster]', which has models of the APIs of "
    "JobSet and Kubernetes",
  )
  content = yaml.safe_load(text)
  # Raises for wrong types and values, and drops keys that the API lacks.
  parsed = models.JobsetV1alpha2JobSet.from_dict(content).to_dict()
  if paths := list(unknown_paths(content, parsed)):
    raise ValueError(f"unknown: {', '.join(paths)}")


def test_the_file_is_valid():
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
def test_mistakes_are_detected(right, wrong):
  text = FILE.read_text()
  assert right in text
  with pytest.raises(ValueError):
    check(text.replace(right, wrong, 1))
