"""Drop-ins: torch's own attention functions, computed by our kernels. `install` is the door."""
