"""Small tools for arrays and trees of arrays, which every package may use.

Open trees.py first: it gives every leaf of a tree a name, which checkpoints,
sharding rules and optimizer masks refer to. types.py defines types that many
modules share. dims.py describes which dimensions of a parameter are inputs,
outputs or layers. hashing.py makes stateless permutations and random numbers.
packed.py shifts packed examples without crossing document boundaries.
picture_features.py names the features that hold pictures, and tile_grids.py has
the sizes of pictures that are cut into tiles. model_flops.py marks work that
does not count as model FLOPs. rope_scalings.py lists the options of scaled
rotary embeddings, for our layers and for published models.
"""
