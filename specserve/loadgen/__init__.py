"""A client that loads a server and tells what it saw: over our own gRPC, or any OpenAI endpoint.

`workload` says what is asked and when, `targets` how one request is asked, `drive` asks them all, `report` counts,
`plot` draws. Only what a client can see is used, and nothing here knows the engine.
"""
