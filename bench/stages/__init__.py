"""`python -m bench stages`: the cost of each single stage on a token's and on a request's way.

A stage is a row of a table: a name, and a function that prepares it and returns the function to be measured. Only this
folder of `bench/` imports the insides of the product, since it measures them; it calls only names without an
underscore.
"""
