"""Other servers of language models, to measure beside this one: each started, found ready and stopped in the same way.

The files `sglang_server`, `dynamo` and, for ours, `espalier` say by which commands each starts; `peer` has what they
share, `running` starts and stops them, `install` makes their environments from the lists beside them, and `table` names
them all. A peer is an optional install of its own: nothing here imports one.
"""
