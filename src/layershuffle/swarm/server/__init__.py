"""The swarm's HTTP server: requests come in, answers go out with their route. Import the modules.

`run` accepts connections, `app` holds the routes and the API keys, `scheduler` carries a request
out, `requests` reads its form and decodes its images, and `schemas` is the JSON of the answer.
`limits` says how much is taken in, `errors` has the refusals, `metrics` counts, `tls` encrypts, and
`admin` is the operator's own socket.

`page` holds the files and routes of the page, `gateway_page` puts it before a swarm and `demo`
before models in this process, by which `workbench` answers. `live` sends the state of the swarm to
the page, `following` the visits of one request. `docs_page` makes the page of the API.

Clients read answers with `schemas`, which imports no web framework.
"""
