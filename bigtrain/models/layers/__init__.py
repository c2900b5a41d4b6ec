"""The layers that models are made of; a config cannot name them.

Open attention.py and mlp.py first: every transformer here uses this attention
and this MLP. The attention uses the masks of masks.py and a backend of
attention_backends.py. The blocks made of attention and MLP are in encoder.py
(ViT, text tower), causal_block.py (decoder-only language models),
captioner_decoder.py and t5_stack.py. stack.py repeats a block, in a loop or
over the stages of a pipeline (stages.py). moe.py replaces MLPs by experts, and
deltanet.py replaces attention by a recurrence. projector.py and image_tokens.py
bring pictures into the text of a decoder. lora.py and quantized.py change the
dense layers of any model. Models, objective and checkpoints import this
package, which imports arrays, config and sharding.
"""
