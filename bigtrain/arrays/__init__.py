"""Small tools for arrays and trees of arrays, which every package may use.

Open trees.py first: it names the leaves of a tree, and checkpoints, sharding
rules and optimizer masks use these names. types.py has the types of such trees,
dims.py says which dimensions of a parameter are inputs, outputs or layers,
hashing.py makes permutations and random numbers without state, packed.py looks
ahead within documents, and model_flops.py marks work that does not count as
model FLOPs. rope_scalings.py lists the options of scaled rotary embeddings, for
our layers and for published models.
"""
