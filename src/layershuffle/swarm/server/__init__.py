"""The swarm's HTTP server: it answers requests with classes and the route. Import the modules.

`run` accepts connections, `app` holds the routes and the API keys, `admission` bounds what clients
take, `scheduler` carries a classification out, `requests` reads its options and its body, `images`
decodes, and `schemas` is the JSON of the answer. `limits` has the bounds, `errors` the refusals,
`metrics` counts, `tls` encrypts, and `admin` takes the operator's commands.

`page` holds the files and routes of the page, for a swarm and for the models of `workbench` in this
process.

Clients read answers with `schemas`, which imports no web framework.
"""
