"""Requests whose client has left: for how long does a server's engine compute on for nobody?

`scenes` has clients that leave at a stage of their request, `activity` observes the engine from outside, by the CPU
time of its processes, so that every server is measured in the same way, and `command` makes one table of it.
"""
