"""Drop-ins: torch's own attention and grouped_mm, computed by our kernels. `install` is the door."""
