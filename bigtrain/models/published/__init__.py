"""Parameters of published models, loaded into our models and exported again.

Open decoder_families.py first: each published architecture is a table of
fields, read in both directions, with rules (decoder_rules.py), and a table of
arrays (decoder_arrays.py). families.py reads, compares and writes config.json
with them, and layer_patterns.py finds the period of layers that differ;
tables.py loads and exports arrays, of four bits too (mxfp4.py). vit_families.py
has ViTs, t5_families.py T5s, under T5X's names too (t5x.py). blocks.py converts
between stacked and separate blocks; conversions.py restores dtypes and names,
and resamples position embeddings. The modules in bigtrain/models import this
package for their `from_published`, `to_published` and `published_fields`; a
warm start shows its remarks on arrays.
"""
