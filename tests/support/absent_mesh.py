"""A mesh of devices that are absent, to trace and lower for them."""

import jax

from bigtrain import sharding


def use(
  device_kind: str, platform: str, **sizes: int
) -> jax.sharding.use_abstract_mesh:
  """A context as of jax.set_mesh, with sizes of the axes."""
  sizes = {**dict.fromkeys(sharding.BATCH_AXES, 1), **sizes}
  mesh = jax.sharding.AbstractMesh(
    (*sizes.values(),),
    (*sizes,),
    axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
    abstract_device=jax.sharding.AbstractDevice(
      device_kind=device_kind, num_cores=1, platform=platform
    ),
  )
  return jax.sharding.use_abstract_mesh(mesh)
