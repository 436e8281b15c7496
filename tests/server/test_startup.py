"""What a start tells while it runs."""

from pathlib import Path

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.server.startup import load_engine


def test_the_progress_names_the_model_without_its_path(random_llama_dir: Path) -> None:
    config = EngineConfig.model_validate(
        {
            "load": {"model": str(random_llama_dir), "load_format": "null"},
            "cache": {"num_gpu_blocks_override": 64},
            "device": {"device": "cpu"},
        }
    )
    stages: list[str] = []
    load_engine(ServerConfig(), config, stages.append)
    assert any(random_llama_dir.name in stage for stage in stages)
    assert not any(str(random_llama_dir.parent) in stage for stage in stages)
