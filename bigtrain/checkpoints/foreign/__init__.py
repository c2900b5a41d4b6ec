"""Files of parameters that other programs wrote.

Open parameter_files.py first: it opens .npz and .safetensors files, and
checkpoints of this and other programs alike. safetensors_files.py also writes
exports; jax_folders.py reads the folders of T5X, Mesh TF and big_vision.
Checkpoints, inference and tools may import this package.
"""
