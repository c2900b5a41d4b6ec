"""The loss of embeddings against its definition in float64."""

import jax
import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder
from bigtrain.tasks import text_embedding

B, N, E = 6, 2, 8
RNG = np.random.default_rng(0)
Z = {
  "query": RNG.normal(size=(B, E)),
  "positive": RNG.normal(size=(B, E)),
  "negative": RNG.normal(size=(B, N, E)),
}


def infonce(z, temperature):
  """Mean of both directions; wrong answers have no query."""
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  query, right = unit(z["query"]), unit(z["positive"])
  answers = np.concatenate([right, unit(z["negative"]).reshape(B * N, -1)])
  entropy = lambda logits: np.mean(
    np.log(np.exp(logits).sum(1)) - np.diag(logits)
  )
  forward = entropy(query @ answers.T / temperature)
  backward = entropy(right @ query.T / temperature)
  return forward, backward


@pytest.mark.parametrize(
  "chunk", [4, pytest.param(1024, marks=pytest.mark.slow)]
)
def test_the_loss_is_infonce_with_wrong_answers(chunk):
  z = {name: x.astype(np.float32) for name, x in Z.items()}
  run = lambda **options: text_embedding.embeddings_loss_fn(
    {}, z, {}, temperature=0.3, chunk=chunk, **options
  )["loss"]
  forward, backward = infonce(Z, 0.3)
  total, number = run()
  np.testing.assert_allclose(total / number, (forward + backward) / 2, 1e-6)
  narrow = {name: x[..., :3] for name, x in Z.items()}
  both = sum(map(sum, (infonce(Z, 0.3), infonce(narrow, 0.3)))) / 2
  np.testing.assert_allclose(run(widths=(3, E))[0] / number, both, 1e-6)
  with pytest.raises(ConfigError, match="config.loss.widths"):
    run(widths=(3, 9))


def test_padding_has_no_answers():
  z = {name: x.astype(np.float32) for name, x in Z.items()}
  mask = np.array([1, 1, 0, 1, 1, 0], np.float32)
  padded = text_embedding.embeddings_loss_fn({}, z, {"_mask": mask})["loss"]
  real = {name: x[mask > 0] for name, x in z.items()}
  alone = text_embedding.embeddings_loss_fn({}, real, {})["loss"]
  np.testing.assert_allclose(padded, alone, rtol=1e-6)


def test_texts_are_embedded_alone():
  sizes = dict(width=16, depth=1, num_heads=2, mlp_dim=24, vocab_size=31)
  model = decoder.Model(variant="llama", **sizes, pool="mean")
  ids = RNG.integers(1, 31, (3, 7)).astype(np.int32)
  ids[1, 4:] = -1
  variables = model.init(jax.random.key(0), **text_embedding._inputs(ids))
  fns = text_embedding.predict_fns(model)
  z = fns["text"](variables, {"query": ids})
  alone = fns["text"](variables, {"query": ids[1:2, :4]})
  np.testing.assert_allclose(z[1:2], alone, atol=1e-6)
  np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, rtol=1e-6)
