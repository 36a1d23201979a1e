"""The page of `layershuffle demo`: a model of this process, taken apart by who looks at it.

`app` holds the routes and `workbench` the models. A gateway imports nothing of this: the page of a
swarm is files that ask its API.
"""
