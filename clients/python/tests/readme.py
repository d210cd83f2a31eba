"""Prints the Python examples of the README, one after the other."""

import re
from pathlib import Path

text = (Path(__file__).parent.parent / "README.md").read_text()
blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
assert len(blocks) == 2
print("\n".join(blocks))
