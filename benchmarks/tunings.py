"""Measures what each tuning is worth: the same as `lightning-verl tunings`, with the result in docs/benchmarks.

    python benchmarks/tunings.py
    python benchmarks/tunings.py --only layout checkpointing
    python benchmarks/tunings.py --table-only

The first line measures every row, the second one two of them, and the last one none: it writes the page
docs/benchmarks/tunings.md from docs/benchmarks/tunings.json.
"""

from __future__ import annotations

from pathlib import Path

from lightning_verl.tuning.tunings import main

RESULTS = Path(__file__).parents[1] / "docs" / "benchmarks" / "tunings.json"

if __name__ == "__main__":
    main(program="python benchmarks/tunings.py", output=RESULTS)
