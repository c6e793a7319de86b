"""``python -m lightning_verl``, the same as ``lightning-verl``."""

from __future__ import annotations

import sys

from lightning_verl.cli import main

if __name__ == "__main__":
    sys.exit(main())
