"""`python -m bench stages`: what each stage of a token's and of a request's way costs by itself.

A stage is a row of a table: a name, and a function that prepares it and returns the function to be measured. This is
the one folder of `bench/` that imports the insides of the product, since these are what it measures; it calls only what
has a name without an underscore.
"""
