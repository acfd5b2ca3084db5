"""Finds faults of kernels that a run may not show: races, missing waits and barriers, unwritten memory.

    with bridge.sanitize() as report:
        my_op(x)
    print(report)

How it flows: while a report is open, `bridge.execute` and `bridge.ranks.simulation` hand each call to
`calls`; `runs` runs the call's program several times in JAX's TPU interpreter, where
`bridge.interpretation.observer` notes signs; `judge` makes findings of them, and `report` merges those. `cli`
does all of that for a script.
"""
