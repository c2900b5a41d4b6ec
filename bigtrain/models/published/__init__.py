"""Published models: their config.json and arrays, loaded and exported again.

Open decoders/llama.py first: a family is one definition, which says how the
keys of config.json determine a model's fields, in both directions, and where
each array belongs. families.py defines `Family` and its rules, tables.py the
tables of arrays. layouts.py reads, compares and writes config.json with them,
and array_files.py loads and exports the arrays.

decoder_families.py, t5_families.py, vit_families.py, bert_families.py,
stage_families.py and two_tower_families.py have the families of a model in
bigtrain/models each, or list them: those of decoders are in decoders/, those of
ViTs in vits/. encoder_rules.py has what several kinds of encoders share.

layer_patterns.py finds the period of layers that differ, mxfp4.py and
fp8_blocks.py read arrays of four and eight bits, timm.py the config.json of
timm. blocks.py converts between
stacked and separate blocks; conversions.py restores dtypes and names. The
modules in bigtrain/models import this package.
"""
