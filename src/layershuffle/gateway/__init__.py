"""Inference on unreliable hosts. A gateway takes requests; hosts dial in and serve blocks.

`brain` decides: pure functions of a state and a moment. `hosts` carries decisions out on hosts
that dial in. `http` is what clients see. `calibration` says what to expect of k blocks, and
`client` asks a gateway. Stem and head of a model run at the gateway, blocks on hosts.
"""
