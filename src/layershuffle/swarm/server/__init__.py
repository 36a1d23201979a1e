"""The swarm's HTTP server: it answers requests with classes and the route. Import the modules.

`run` accepts connections, `app` holds the routes, `gateway` carries a classification out,
`admission` bounds what clients take and refuses the rest, `images` decodes, and `schemas` is the
JSON of the answer. `doors` has keys and certificates, `metrics` what is known of the gateway,
`admin` the operator's commands, `operating` what lies on the gateway's machine, and `start` puts
all of it together.

`page` holds the routes of the swarm's page and of tabs that become hosts. That of `layershuffle
demo`, which runs models of its own, is `layershuffle.page`.
"""
