"""The swarm's HTTP server: it answers requests with classes and the route. Import the modules.

`run` accepts connections, `app` holds the routes, `admission` checks keys and gives out places,
`gateway` carries a classification out, `images` decodes, `schemas` is the JSON of the answer, and
`errors` what becomes of errors. `doors` has keys and certificates, `metrics` what is known of the
gateway, `admin` the operator's commands, `operating` the word on what will fail, and `start` puts
all of it together.

`page` holds the routes of the swarm's page and of tabs that become hosts. That of `layershuffle
demo`, which runs models of its own, is `layershuffle.page`.
"""
