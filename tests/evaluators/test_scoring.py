"""Classification by the likelihood of class names."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import evaluating

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.text import tokenizers

N = 21  # Batches of 8: the last has 5 examples.
NAMES = ["a cat", "two dogs", "an eight", "mice", "a whale", "snow"]
LABELS = np.arange(N) % len(NAMES)
ARRAYS = dict(label=LABELS, right=(np.arange(N) % 3 > 0).astype(np.int32))


def ids(text):
  row = np.zeros(12, np.int32)
  encoded = [*tokenizers.get("bytes").encode(text), 2]
  row[: len(encoded)] = encoded
  return row


def likelihoods(variables, batch):
  """Ranks the right class first if the feature "right" is 1, else second."""
  tokens_CL = batch["class_tokens"]
  assert tokens_CL.shape == (len(NAMES), 12)
  classes = jnp.arange(len(NAMES))
  scores_BC = -1.0 * (classes != batch["label"][:, None])
  # The tokens must encode the names, in order.
  expected = jnp.asarray(np.stack([ids(name) for name in NAMES]))
  scores_BC += jnp.where(jnp.all(tokens_CL == expected), 0.0, jnp.nan)
  wrong = (classes == (batch["label"][:, None] + 1) % len(NAMES)) * 2.0
  return scores_BC + wrong * (1 - batch["right"])[:, None]


def score(arrays=ARRAYS, **options):
  evaluator = evaluating.build(
    "scoring",
    likelihoods,
    data=dict(type="arrays", arrays=arrays),
    **dict(class_names=NAMES, pp_text="tokenize(max_len=12)") | options,
  )
  return evaluator.run({}, step=1)


def test_names_from_a_list_or_a_file(tmp_path):
  expected = {"acc": 14 / 21, "top2_acc": 1.0}
  assert score(top_k=(1, 2, 7)) == pytest.approx(expected)
  path = tmp_path / "names.txt"
  path.write_text("\n".join(NAMES) + "\n")
  results = score(class_names=str(path), top_k=(1, 2))
  assert results == pytest.approx(expected)


def test_a_label_beyond_the_names_is_an_error():
  arrays = ARRAYS | {"label": LABELS + len(NAMES) * (LABELS == 2)}
  message = (
    r"evals\.val: arrays, row \d+: the class number 'label' is \d+, but "
    rf"config\.evals\.val\.class_names={len(NAMES)} allows 0 to "
  )
  with pytest.raises(DataError, match=message):
    score(arrays)


def test_examples_without_a_label_do_not_count():
  arrays = ARRAYS | {"label": np.where(np.arange(N) < 9, LABELS, -1)}
  assert score(arrays)["acc"] == pytest.approx(6 / 9)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(class_names="no/such.txt"), "val.class_names: .*file: /.*no/such"),
    (dict(class_names=["a", " "]), "val.class_names: class 1: expected a name"),
    (dict(class_names=[]), "val.class_names: expected at least one name"),
    (dict(prompt="a photo"), "val.prompt: expected a prompt with one {}"),
    (dict(pp_text="lower"), "val.pp_text: the ops make no 'labels'"),
    (dict(pp_text="choice|tokenize"), "val.pp_text: .* without random numbers"),
    (dict(label_key="lable"), "val: .*'lable'.* Did you mean 'label'"),
  ],
)
def test_mistakes(options, message):
  with pytest.raises(ConfigError, match=f"config.evals.{message}"):
    score(**options)
