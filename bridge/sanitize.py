"""`python -m bridge.sanitize`; see `bridge.sanitizer.cli`.

As `bridge.sanitize` stands for the function, this file is only run, and never imported.
"""

from __future__ import annotations

import sys

if __name__ == "bridge.sanitize":
    raise ImportError(
        "bridge.sanitize is a function, not a module: write `from bridge import sanitize`; "
        "`python -m bridge.sanitize script.py` checks a script"
    )

if __name__ == "__main__":
    from bridge.sanitizer.cli import main

    sys.exit(main())
