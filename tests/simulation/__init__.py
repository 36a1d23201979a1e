"""A swarm in virtual time: the real router over simulated hosts that come and go, up to 10,000.

`run.simulate` is the entry point. `hosts` are the hosts, `outcome` the results, and `clock` is the
event loop in virtual time.
"""
