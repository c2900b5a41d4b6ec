"""Families of ViTs: of transformers, and of timm.

Open plain_vit.py first: the others are that family with changes. The rules that
other encoders share are in ../encoder_rules.py; ../vit_families.py lists the
families in order.
"""
