"""Inference on unreliable hosts: block hosts, an order-free router, a server.

The decisions are pure functions: `policy` takes the `state` of the hosts and the time, and returns
the next action. `router` carries it out over a transport (`members`: hosts that dial in;
`tests/simulation`: none). Hosts hold blocks alone; stem and head of the model stay at the gateway.
"""
