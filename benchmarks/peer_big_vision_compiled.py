"""An update of big_vision, compiled for absent TPUs, for compilers.py.

Model, optimizer and sharding come unmodified from the checkout. The update is
part of the main function of each of its trainers, so this module repeats the
lines that combine the parts, norms of every step included:

  vit        train.py, with the whole state on each chip, as its configs have it
  paligemma  trainers/proj/paligemma/train.py, with the state split over the
             chips, as its configs of transfers have it

  python -m benchmarks.peer_big_vision_compiled OPTIONS TEXT

OPTIONS is JSON: trainer, topology, batch_size, and keyword arguments of the
model. The program is written to the file TEXT, and its memory printed.

Axes: B batch, L length of a text, V vocabulary.
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from big_vision import optax as bv_optax
from big_vision import sharding as bv_sharding
from big_vision import utils
from big_vision.models import vit
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bigtrain.runtime import device_memory
from bigtrain.sharding import absent


class Trainer(NamedTuple):
  """What an update is made of.

  Attributes:
    init: returns the first parameters.
    loss: (params, rng, batch) -> loss.
    batch: shapes and dtypes of the features of an example.
    optimizer: arguments of its optimizer.
    sharding: its rule for the state.
    schedule: length of the run.
  """

  init: Callable[[], Any]
  loss: Callable[[Any, jax.Array, Mapping[str, jax.Array]], jax.Array]
  batch: Mapping[str, tuple[tuple[int, ...], Any]]
  optimizer: Mapping[str, Any]
  sharding: str
  schedule: Mapping[str, int]


def _vit(options: Mapping[str, Any]) -> Trainer:
  model = vit.Model(**options["model"])

  def init() -> Any:
    images = jnp.zeros((1, 224, 224, 3))
    return model.init(jax.random.PRNGKey(0), images)["params"]

  def loss(params: Any, rng: jax.Array, batch: Any) -> jax.Array:
    logits, _ = model.apply(
      {"params": params}, batch["image"], train=True, rngs={"dropout": rng}
    )
    return utils.sigmoid_xent(logits=logits, labels=batch["labels"])

  return Trainer(
    init,
    loss,
    batch=dict(
      image=((224, 224, 3), jnp.float32),
      labels=((options["model"]["num_classes"],), jnp.float32),
    ),
    optimizer=dict(
      optax=dict(mu_dtype="bfloat16"),
      lr=1e-3,
      wd=1e-4,
      schedule=dict(decay_type="cosine", warmup_steps=10_000),
    ),
    sharding="replicate",
    schedule=dict(total_steps=1_000_000, data_size=1_281_167),
  )


def _paligemma(options: Mapping[str, Any]) -> Trainer:
  """A text has one token more than are seen: each token predicts the next."""
  from big_vision.models.proj.paligemma import paligemma

  model = paligemma.Model(**options["model"])
  length = options["text_length"] + 1

  def apply(params: Any, batch: Any, **kwargs: Any) -> Any:
    return model.apply(
      {"params": params},
      batch["image"],
      batch["text"][:, :-1],
      batch["mask_ar"][:, :-1],
      **kwargs,
    )

  def init() -> Any:
    text = jnp.zeros((1, length), jnp.int32)
    batch = dict(image=jnp.zeros((1, 224, 224, 3)), text=text, mask_ar=text)
    rng = jax.random.PRNGKey(0)
    rngs = {"params": rng, "dropout": rng}
    return apply({}, batch, rngs=rngs, mutable=["params"])[1]["params"]

  def loss(params: Any, rng: jax.Array, batch: Any) -> jax.Array:
    logits_BLV, _ = apply(params, batch, train=True, rngs={"dropout": rng})
    log_probs_BLV = jax.nn.log_softmax(logits_BLV, axis=-1)
    targets_BLV = jax.nn.one_hot(batch["text"][:, 1:], logits_BLV.shape[-1])
    mask_BL = batch["mask_loss"][:, 1:]
    likelihood_BL = jnp.sum(log_probs_BLV * targets_BLV, axis=-1) * mask_BL
    number_B = jnp.clip(jnp.sum(mask_BL, axis=-1), 1)
    return jnp.mean(-jnp.sum(likelihood_BL, axis=-1) / number_B)

  return Trainer(
    init,
    loss,
    batch=dict(
      image=((224, 224, 3), jnp.float32),
      text=((length,), jnp.int32),
      mask_ar=((length,), jnp.int32),
      mask_loss=((length,), jnp.float32),
    ),
    optimizer=dict(
      lr=3e-6,
      wd=3e-7,
      schedule=dict(decay_type="cosine", warmup_percent=0.05),
    ),
    sharding='fsdp(axis="data")',
    schedule=dict(total_steps=17_000, data_size=443_757),
  )


_TRAINERS = {"vit": _vit, "paligemma": _paligemma}


def main() -> None:
  """Compiles the update of the options on the command line."""
  options = json.loads(sys.argv[1])
  batch_size = options["batch_size"]
  trainer = _TRAINERS[options["trainer"]](options)
  mesh = Mesh(np.array(absent.devices(options["topology"])), ("data",))
  replicated = NamedSharding(mesh, PartitionSpec())
  split = NamedSharding(mesh, PartitionSpec("data"))

  params = nn.unbox(jax.eval_shape(trainer.init))
  tx, _ = bv_optax.make(
    ml_collections.ConfigDict(
      dict(trainer.optimizer, optax_name="scale_by_adam", grad_clip_norm=1.0)
    ),
    params,
    sched_kw=dict(trainer.schedule, batch_size=batch_size),
  )

  def update(state: Any, rng: jax.Array, batch: Any) -> Any:
    params, opt = state["params"], state["opt"]
    count = bv_optax.get_count(opt, jittable=True)
    _, rng = jax.random.split(jax.random.fold_in(rng, count))
    loss, grads = jax.value_and_grad(trainer.loss)(params, rng, batch)
    updates, opt = tx.update(grads, opt, params)
    params = optax.apply_updates(params, updates)
    trees = {"grads": grads, "params": params, "updates": updates}
    norms = {f"l2_{n}": optax.global_norm(tree) for n, tree in trees.items()}
    return {"params": params, "opt": opt}, {"training_loss": loss, **norms}

  def described(shape: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

  state = {"params": params, "opt": jax.eval_shape(tx.init, params)}
  shardings = bv_sharding.infer_sharding(
    state, strategy=[(".*", trainer.sharding)], mesh=mesh
  )
  rng = described(jax.eval_shape(jax.random.PRNGKey, 0), replicated)
  batch = {
    name: jax.ShapeDtypeStruct((batch_size, *shape), dtype, sharding=split)
    for name, (shape, dtype) in trainer.batch.items()
  }
  # Their trainers write `with mesh`, with which today's flax leaves out the
  # models' constraints: a step of PaliGemma would wait 2.7 s for activations.
  with jax.set_mesh(mesh), nn.logical_axis_rules([("act_batch", "data")]):
    program = (
      jax.jit(update, donate_argnums=0, out_shardings=(shardings, replicated))
      .lower(jax.tree.map(described, state, shardings), rng, batch)
      .compile()
    )
  with open(sys.argv[2], "w") as file:
    file.write(program.as_text())
  print(json.dumps(device_memory.memory_bytes(program)))


if __name__ == "__main__":
  main()
