"""The OpenAPI document of the gateway, and the JSON Schemas of its requests and answers."""
