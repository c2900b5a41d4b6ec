"""Published models: their config.json and arrays, loaded and exported again.

Open decoders/llama.py first: a family is one definition, which says how the
keys of config.json determine a model's fields, in both directions, and where
each array belongs. families.py defines `Family` and its rules, tables.py the
tables of arrays. layouts.py reads, compares and writes config.json with them,
and array_files.py loads and exports the arrays.

A module `*_families.py` has the families of one kind of model, or lists them:
decoders/ has those of decoders, vits/ of ViTs, and vlms/ of models that read
pictures.
encoder_rules.py has the rules that several kinds of encoders share.
decoder_variants.py has the sizes that a config can name instead of a published
folder.

layer_patterns.py finds the period of layers that differ. mxfp4.py and
fp8_blocks.py read arrays of four and eight bits, and timm.py reads timm's
config.json. blocks.py converts between stacked and separate blocks, and
conversions.py restores dtypes and names. The modules in bigtrain/models import
this package.
"""
