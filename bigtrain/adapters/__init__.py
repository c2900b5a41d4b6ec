"""Adapters of a frozen base: config.adapters, from the start to the export.

Open frozen_base.py first: where the base of a run comes from. peft_files.py
reads and writes adapters in PEFT's format, and trained.py finds and merges the
adapters of a run. The layers are in models/layers/lora.py. The program,
inference and tools import this package.
"""
