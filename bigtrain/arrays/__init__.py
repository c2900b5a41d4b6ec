"""Facts about arrays that every package uses; they import nothing of ours.

Open trees.py first: trees of arrays by the names of their leaves, which
checkpoints, sharding rules and optimizer masks share. types.py names the types
of these trees, dims.py says which dimensions of a parameter are inputs, outputs
or layers, hashing.py makes permutations and random numbers without state, and
model_flops.py marks work that model FLOPs leave out. rope_scalings.py lists the
options of scaled rotary embeddings, for our layers and for published models.
"""
