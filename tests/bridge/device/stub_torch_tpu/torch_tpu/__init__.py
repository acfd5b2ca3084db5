"""A stand-in for torch_tpu 0.2.0, as far as `bridge` has to do with it.

It registers the device "tpu" as that package does: when torch loads its backends, if there is a TPU (here: if
STUB_TPU=1). Its tensors lie in host memory and its compiler is JAX's for the CPU.
"""
