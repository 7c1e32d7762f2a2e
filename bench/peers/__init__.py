"""Other servers of language models, to measure beside this one: each started, found ready and stopped in the same way.

A file for each (`sglang_server`, `dynamo`, `dynamo_mocker`, `smg`, and `espalier` for ours) says by which commands it
starts; `peer` has what they share, `running` starts and stops them, `install` makes their environments from the lists
beside them, and `table` names them all. A peer is an optional install of its own: nothing here imports one.
"""
