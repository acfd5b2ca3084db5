"""These tests need the simulated device: registered by `import torch` where the package is installed."""

from __future__ import annotations

from bridge import device

device.register()
