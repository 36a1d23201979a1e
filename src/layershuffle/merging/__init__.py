"""Combine several models: merges, soups and ensembles (paper, section 4.4).

`settings` and `plans` are plain data. `compatibility` checks which donors can be merged,
`group` merges them, `soups` and `ensembles` are the alternatives. `scoring` measures all of them on
one data set; `recipe` writes a single merge to disk.
"""
