"""The update of big_vision's ViT, compiled for absent TPUs, for compilers.py.

Model, loss and optimizer come unmodified from the checkout. The update is part
of the main function of its trainer, so this module repeats the lines that
combine the parts, norms of every step included. The state is replicated, as in
its configs of ViTs.

  python -m benchmarks.peer_big_vision_compiled OPTIONS TEXT

OPTIONS is JSON: topology, batch_size, and keyword arguments of the model. The
program is written to the file TEXT, and its memory printed.
"""

import json
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from big_vision import optax as bv_optax
from big_vision import utils
from big_vision.models import vit
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bigtrain.runtime import device_memory
from bigtrain.sharding import absent


def main() -> None:
  """Compiles the update of the options on the command line."""
  options = json.loads(sys.argv[1])
  batch_size = options["batch_size"]
  devices = np.array(absent.devices(options["topology"]))
  mesh = Mesh(devices, ("data",))
  replicated = NamedSharding(mesh, PartitionSpec())
  split = NamedSharding(mesh, PartitionSpec("data"))
  model = vit.Model(**options["model"])

  def init() -> Any:
    images = jnp.zeros((1, 224, 224, 3))
    return model.init(jax.random.PRNGKey(0), images)["params"]

  params = nn.unbox(jax.eval_shape(init))
  tx, _ = bv_optax.make(
    _optimizer(),
    params,
    sched_kw=dict(
      total_steps=1_000_000, batch_size=batch_size, data_size=1_281_167
    ),
  )

  def update(state: Any, rng: jax.Array, images: Any, labels: Any) -> Any:
    params, opt = state
    count = bv_optax.get_count(opt, jittable=True)
    _, rng = jax.random.split(jax.random.fold_in(rng, count))

    def loss_fn(params: Any) -> jax.Array:
      logits, _ = model.apply(
        {"params": params}, images, train=True, rngs={"dropout": rng}
      )
      return utils.sigmoid_xent(logits=logits, labels=labels)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt = tx.update(grads, opt, params)
    params = optax.apply_updates(params, updates)
    trees = {"grads": grads, "params": params, "updates": updates}
    norms = {f"l2_{n}": optax.global_norm(tree) for n, tree in trees.items()}
    return (params, opt), {"training_loss": loss, **norms}

  def described(shape: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

  state = jax.tree.map(
    lambda x: described(x, replicated),
    (params, jax.eval_shape(tx.init, params)),
  )
  rng = described(jax.eval_shape(jax.random.PRNGKey, 0), replicated)
  batch = [
    jax.ShapeDtypeStruct((batch_size, *shape), jnp.float32, sharding=split)
    for shape in [(224, 224, 3), (options["model"]["num_classes"],)]
  ]
  with mesh, nn.logical_axis_rules([("act_batch", "data")]):
    program = (
      jax.jit(update, donate_argnums=0, out_shardings=(replicated, replicated))
      .lower(state, rng, *batch)
      .compile()
    )
  with open(sys.argv[2], "w") as file:
    file.write(program.as_text())
  print(json.dumps(device_memory.memory_bytes(program)))


def _optimizer() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    dict(
      optax_name="scale_by_adam",
      optax=dict(mu_dtype="bfloat16"),
      lr=1e-3,
      wd=1e-4,
      grad_clip_norm=1.0,
      schedule=dict(decay_type="cosine", warmup_steps=10_000),
    )
  )


if __name__ == "__main__":
  main()
