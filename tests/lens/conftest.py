"""One answer to what PyTorch asks of libraries, whichever are installed."""

import pytest

from autosac.lens import attention_choice


@pytest.fixture(autouse=True)
def old_cudnn(monkeypatch):
    """Flash attention comes first on every GPU unless a test says otherwise."""
    monkeypatch.setattr(attention_choice, "cudnn_version", lambda: 91002)
