"""Families of decoders, a module for each lineage.

Open llama.py first: most families are Llama with changes. rope_rules.py,
window_rules.py, bias_rules.py, expert_rules.py and deltanet_rules.py convert
keys that several lineages share; a rule that one lineage needs is beside its
families. shared_arrays.py has tables of arrays. model_fields.py brings the
fields of models/decoder.py into a form that can be compared.
../decoder_families.py lists the families in the order in which an export tries
them.
"""
