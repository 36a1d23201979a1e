"""The swarm in virtual time: the real router over simulated hosts that come and go, up to 10,000.

`simulate` in `run` is the way in. `scenario` says what is simulated, `hosts` are the hosts,
`outcome` the figures, and `clock` is the event loop whose time jumps.
"""
