"""An engine in this process, from the same settings as `octavo serve`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.config.engine import EngineConfig
from octavo.config.env import num_cores
from octavo.config.model import ModelConfig
from octavo.engine.assembly import engine_limits, launch_of, make_executor
from octavo.engine.core.errors import ConfigurationError
from octavo.engine.core.messages import AddRequest
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.loader import EncoderCheckpoint, resolve_checkpoint
from octavo.engine.worker.memory import resolve_device, resolve_dtype
from octavo.loadtest.offline.ceilings import Ceilings, measure_ceilings


@dataclass(frozen=True, slots=True)
class OfflineEngine:
    """A warm engine and the facts of what it runs."""

    engine: LLMEngine
    name: str
    facts: ModelConfig
    dtype: torch.dtype
    device: torch.device
    num_threads: int
    runs_model: bool
    int8_weights: bool
    tokenizer_dir: Path

    def describe(self) -> str:
        """Model, precision and place, for the head of a report."""
        dtype = str(self.dtype).removeprefix("torch.") + " with int8 weights" * self.int8_weights
        place = f"cpu, {self.num_threads} threads" if self.device.type == "cpu" else "cuda"
        return f"{self.name} in {dtype} on {place}" + ", no model run" * (not self.runs_model)

    def ceilings(self) -> Ceilings:
        """What the machine can do at best; takes seconds."""
        return measure_ceilings(self.dtype, self.device, self.num_threads)


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[OfflineEngine]:
    """Load the configured model; shut down at the end.

    Raises ConfigurationError, of which CheckpointError is one.
    """
    checkpoint = resolve_checkpoint(config.load)
    if isinstance(checkpoint, EncoderCheckpoint):
        raise ConfigurationError(f"{checkpoint.name} makes embeddings only, and no text to measure")
    executor = make_executor(config, checkpoint)
    engine = LLMEngine(
        config, engine_limits(config, checkpoint, executor), executor, launch_of(executor)
    )
    try:
        yield OfflineEngine(
            engine=engine,
            name=checkpoint.name,
            facts=checkpoint.model_config,
            dtype=resolve_dtype(config.load.dtype, checkpoint.model_config),
            device=resolve_device(config.device.device),
            num_threads=config.device.num_cpu_threads or num_cores(),
            runs_model=config.load.load_format != "null",
            int8_weights=config.load.quantization == "int8",
            tokenizer_dir=checkpoint.tokenizer_dir,
        )
    finally:
        engine.shutdown()


def greedy_request(request_id: str, prompt: Sequence[int], output_len: int) -> AddRequest:
    """A request for exactly `output_len` tokens."""
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    return AddRequest(request_id, tuple(prompt), params, arrival_time=0.0)
