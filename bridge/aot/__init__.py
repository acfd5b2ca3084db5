"""The TPU compiler, run in worker processes, so that a chip can be compiled for where there is none.

`lowering` traces and lowers a function here, in the calling process, where closures are alive and Python
errors keep their traceback. `pool` sends the bytes to a `worker`, a process of its own that has loaded
libtpu: its flags hold for a whole process, and it may end the process it runs in. `errors` and `explain` put
what JAX and the compiler say into plain words. The public functions are in `bridge.topology`.
"""
