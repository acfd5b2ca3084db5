"""The commands of `tpu-autotune` that need the TPU compiler, one module each."""
