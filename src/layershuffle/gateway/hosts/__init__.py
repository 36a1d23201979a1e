"""What carries decisions out on hosts: `router` walks a request over them.

`connections` holds the hosts that dial in, `health` judges them, `coordinator` gives them blocks,
`children` are the hosts of this machine, and `service` puts all of it together.
"""
