"""The layers that models are made of; a config cannot name them.

Open attention.py and mlp.py first: every transformer uses that attention, with
the masks of masks.py and a backend of attention_backends.py, and that MLP.
Blocks are built of them in encoder.py (ViT, text tower), causal_block.py
(decoder-only language models), captioner_decoder.py and t5_stack.py; stack.py
repeats a block, and moe.py replaces MLPs by experts. Models and tests import
this package; it imports settings and sharding.
"""
