"""Everything that refuses, warns or tries: nothing of it changes what a model computes.

What rounds, orders per sample and shared beginnings need of a backbone is tried with its real
blocks (`trials`, `sharing`, `rounds`), and a trial leaves no trace (`untouched`).
"""
