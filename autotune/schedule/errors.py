"""What can go wrong between the compiler's dumps and a score."""

from __future__ import annotations


class DumpError(ValueError):
    """The dumps cannot be read: a file is missing, or its text is not of the known form.

    The text is undocumented and changes between releases of libtpu, so the message names what was expected.
    """


class RunawayError(RuntimeError):
    """A schedule did not end: its grid is too large to execute, or a loop bound is wrong."""
