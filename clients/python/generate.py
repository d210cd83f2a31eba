"""Writes the modules of the ordinary client from those of the asynchronous one, which are the source of both.

``python generate.py`` writes them; tests/test_generated.py fails where they differ."""

from __future__ import annotations

import re
from pathlib import Path

SOURCE = Path(__file__).parent / "src" / "ephemeral"
MODULES = {"_async.py": "_sync.py", "_account_async.py": "_account_sync.py"}

# What the asynchronous modules say, and the ordinary ones instead, in this order.
REPLACED = [
    (r'"""The client for asyncio and trio code\."""', '"""The client for ordinary code. Generated from _async.py by generate.py: change that."""'),
    (r"The calls of the asynchronous client beside runs\. ``_account_sync`` has the same\.",
     "The calls of the ordinary client beside runs. Generated from _account_async.py by generate.py: change that."),
    (r"\bimport anyio\n", ""),
    (r"\bin an ``async with``", "in a ``with``"),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\banyio\.sleep\b", "time.sleep"),
    (r"\b_account_async\b(?!\.py)", "_account_sync"),
    (r"__a(enter|exit|iter|next)__", r"__\1__"),
    (r"\ba(close|read|iter_bytes)\b", r"\1"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"StopAsyncIteration", "StopIteration"),
]


def ordinary(text: str) -> str:
    """The ordinary module that an asynchronous one stands for."""
    for pattern, instead in REPLACED:
        text = re.sub(pattern, instead, text)
    return text


def generated() -> dict[Path, str]:
    """The text of each generated module, by its path."""
    return {SOURCE / to: ordinary((SOURCE / module).read_text()) for module, to in MODULES.items()}


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text)
