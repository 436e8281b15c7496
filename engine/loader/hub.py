"""Checkpoints on the Hugging Face hub."""

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from octavo.config.load import LoadConfig
from octavo.engine.core.errors import CheckpointError
from octavo.engine.loader.names import OnDownload, ignore_download

_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
# Of the subfolders only 1_Pooling counts; others hold the same weights in other formats.
_IGNORED = ["[!1]*/*", "consolidated*"]


def download(
    hub_id: str,
    load: LoadConfig,
    *,
    weights: bool,
    on_download: OnDownload = ignore_download,
) -> Path:
    """Return the snapshot's directory, downloaded with a progress bar or from the cache.

    Raises CheckpointError, within seconds when there is no network and no cached snapshot.
    """
    patterns = [*_SMALL_FILES, "*.safetensors"] if weights else _SMALL_FILES
    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=load.revision,
                cache_dir=load.download_dir,
                allow_patterns=patterns,
                ignore_patterns=_IGNORED,
                tqdm_class=_telling_bar(on_download),
            )
        )
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{hub_id}: the hub has no revision {load.revision!r} of it; see --revision"
        ) from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"{hub_id}: access is restricted; ask for it on the model's page, then log in with "
            "`hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{hub_id}: neither a local directory nor on the hub") from error
    except Exception as error:  # the client lets errors of its HTTP library through
        raise CheckpointError(
            f"{hub_id}: not complete in the local cache, and the hub cannot be reached "
            f"({type(error).__name__}); check the network, or name a local directory or GGUF file"
        ) from error


def _telling_bar(on_download: OnDownload) -> type[tqdm]:
    """Return the hub's progress bar, which also tells its bytes where nobody sees the bar."""

    class TellingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - tqdm's own
            self._counts_bytes = kwargs.get("unit") == "B"
            # The bar's own count stands still without a terminal.
            self._num_bytes = int(kwargs.get("initial", 0))
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            self._num_bytes += int(n or 0)
            if self._counts_bytes:
                on_download(self._num_bytes, int(self.total or 0))
            shown: bool | None = super().update(n)
            return shown

    return TellingBar
