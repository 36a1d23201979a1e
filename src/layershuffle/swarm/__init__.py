"""Inference that answers while its hosts die: block hosts, an order-free router, a server.

The brain is pure and needs no engine: `state` (what is known of the hosts) and `policy` (state in,
next action out, time as an argument). `router` carries its actions out over a transport: `local`
(in this process) or `ray_hosts`. Hosts hold only their blocks (`host`), the head keeps the rest.
"""
