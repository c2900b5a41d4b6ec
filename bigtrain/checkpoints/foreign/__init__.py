"""Files of parameters that other programs wrote.

Open parameter_files.py first: it opens .npz and .safetensors files, and
checkpoints of this program, T5X and big_vision alike. safetensors_files.py
also writes exports; jax_folders.py reads the folders of T5X and big_vision.
Checkpoints, inference and tools may import this package.
"""
