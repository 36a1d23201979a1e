"""Models made of other models: merges, soups and ensembles (paper, section 4.4).

`settings` and `plans` are plain data; `family` says which donors fit together and makes merges of
them; `soups` and `ensembles` stand beside; `scores` measures all of them; `recipe` writes one.
"""
