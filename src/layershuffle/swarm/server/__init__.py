"""The swarm's HTTP face: requests in, answers with their route out. Import the modules.

`limits`, `access` and `clients` say who may ask how much, `bodies` and `intake` read requests,
`images` decodes, `work` carries them out, `answers` is what comes back, `app` ties them to FastAPI,
`door` and `https` let connections in, `serving` runs it. `app`, `door` and `serving` know a server.
"""
