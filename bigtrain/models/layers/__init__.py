"""The layers that models are made of; a config cannot name them.

Open attention.py and mlp.py first: every transformer here uses that one
attention and that one MLP, with the key-value cache of kv_cache.py. Blocks are
built of them in encoder.py (ViT, text tower), causal_block.py (decoder-only
language models), captioner_decoder.py (captioners) and t5_stack.py (T5);
stack.py repeats a block, unrolled or as a loop, and moe.py replaces MLPs by
experts. Models and tests import this package; it imports settings and sharding.
"""
