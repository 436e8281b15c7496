"""Applications over a table for the routes' tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from octavo_fixtures import random_table, script_table
from octavo_serving import TableSettings

MakeSettings = Callable[..., TableSettings]


@pytest.fixture
def scripted(byte_bpe_dir: Path) -> MakeSettings:
    """Makes settings whose model greedily emits a script of token ids and then ends."""

    def make(script: list[int], **settings: Any) -> TableSettings:
        return TableSettings(byte_bpe_dir, script_table(script), **settings)

    return make


@pytest.fixture
def drawn(byte_bpe_dir: Path) -> MakeSettings:
    """Makes settings whose model has random logits; greedy texts do not end soon."""

    def make(table: np.ndarray | None = None, **settings: Any) -> TableSettings:
        return TableSettings(byte_bpe_dir, random_table() if table is None else table, **settings)

    return make
