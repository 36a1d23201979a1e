"""What carries decisions out on hosts: `router` walks a request over them.

`served_model` runs stem and head around that, `places` says who may have a request under way.
`connections` holds the hosts that dial in, `health` judges them, `coordinator` gives them blocks,
`children` are the hosts of this machine, and `service` puts all of it together.
"""
