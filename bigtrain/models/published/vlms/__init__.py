"""Families of models that read pictures, a module for each lineage.

Open vlm_parts.py first: it has the image towers, and the rule that converts the
configs of tower and decoder. ../vision_language_families.py lists the families
in the order in which an export tries them.
"""
