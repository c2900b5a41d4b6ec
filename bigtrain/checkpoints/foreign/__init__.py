"""Files of parameters that other programs wrote, or that they can read.

Open parameter_files.py first: it opens .npz and .safetensors files, and
checkpoints of this program and of others, through one interface.
safetensors_files.py reads and writes .safetensors, jax_folders.py reads the
checkpoints of T5X, Mesh TF and big_vision, and peft_files.py reads and writes
PEFT's adapters, whose modules peft_modules.py finds in our models. Checkpoints,
inference and tools may import this package.
"""
