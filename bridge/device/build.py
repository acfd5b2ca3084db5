"""The command `python -m bridge.device.build`: builds the C++ part of the simulated device."""

from __future__ import annotations

import sys

from bridge.device.building import BuildError, build

if __name__ == "__main__":
    try:
        print(f"built {build()}")
    except BuildError as error:
        sys.exit(f"error: the C++ part of the simulated device was not built: {error}")
