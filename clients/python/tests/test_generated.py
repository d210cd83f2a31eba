"""The ordinary client is the asynchronous one, generated."""

import importlib.util
from pathlib import Path

import pytest

GENERATOR = Path(__file__).parent.parent / "generate.py"


def test_generated_modules_are_current() -> None:
    spec = importlib.util.spec_from_file_location("generate", GENERATOR)
    assert spec and spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for path, text in generate.generated().items():
        if path.read_text() != text:
            pytest.fail(f"{path.name} is not what its asynchronous twin says: run python clients/python/generate.py")
        assert "await " not in text and "async " not in text and "Async" not in text and "anyio" not in text
