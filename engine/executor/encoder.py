"""The executor for encoders, whose embeddings come from transformers' own model.

An encoder reads a text as a whole, so it keeps nothing between steps: a prompt that the scheduler
cuts into chunks is computed in the step of its last one.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.config.engine import EngineConfig
from octavo.config.load import DType, LoadConfig
from octavo.engine.core.errors import CheckpointError, ConfigurationError, is_out_of_memory
from octavo.engine.core.model_output import ModelOutput
from octavo.engine.core.pooling import Embedding, Pooling
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.loader import EncoderCheckpoint
from octavo.engine.worker.memory import check_context, resolve_device, resolve_step_limits
from octavo.engine.worker.pooler import finish

_logger = logging.getLogger(__name__)


class EncoderExecutor:
    """Loads the model and embeds whole texts; serves requests with `pooling` only.

    Its blocks hold nothing: they are what the scheduler counts texts under way by.
    """

    def __init__(self, config: EngineConfig, checkpoint: EncoderCheckpoint) -> None:
        """Ready to serve once made. Raises ConfigurationError and CheckpointError."""
        check_context(config.load.max_model_len, checkpoint.max_model_len)
        if config.load.quantization != "none":
            raise ConfigurationError(
                f"--quantization {config.load.quantization} is for models that write text, not "
                f"for the embeddings of {checkpoint.name}; use --quantization none"
            )
        self._device = resolve_device(config.device.device)
        self._steps = resolve_step_limits(config.scheduler, self._device)
        self._pooling = checkpoint.embedding.pooling
        self.max_model_len = config.load.max_model_len or checkpoint.max_model_len
        block_size = config.cache.block_size
        # One text that is under way, and a step of texts of which each wastes a part of a block.
        self.num_blocks = (
            -(-self.max_model_len // block_size)
            + self._steps.max_num_batched_tokens // block_size
            + self._steps.max_num_seqs
        )
        self._model = _load(checkpoint, config.load).to(self._device).eval()
        self._pad_token_id: int = self._model.config.pad_token_id or 0
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._embed([(self._pad_token_id,)])
        _logger.info(
            "%s on %s: embeddings of up to %d tokens by %s pooling",
            checkpoint.name,
            self._device,
            self.max_model_len,
            self._pooling.value,
        )

    @property
    def max_num_seqs(self) -> int:
        """Most texts in one step."""
        return self._steps.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens in one step, and in one padded batch unless a single text is longer."""
        return self._steps.max_num_batched_tokens

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> ModelOutput:
        """Embeds the texts whose last token is in `plan`."""
        for seq_id in plan.removed_seq_ids:
            del self._prompts[seq_id]
        for new in plan.new_sequences:
            self._prompts[new.seq_id] = new.token_ids
        embeddings: dict[int, Embedding] = {}
        failed: dict[int, str] = {}
        for batch in self._batches([item.seq_id for item in plan.scheduled if item.sample]):
            vectors = self._embed([self._prompts[seq_id] for seq_id in batch])
            made, not_finite = finish(batch, vectors)
            embeddings |= made
            failed |= not_finite
        return ModelOutput({}, failed=failed, embeddings=embeddings)

    def shutdown(self) -> None:
        """Gives up the model."""
        del self._model

    def _batches(self, seq_ids: list[int]) -> Iterator[list[int]]:
        """Texts of similar length together, so that little is padded."""
        batch: list[int] = []
        for seq_id in sorted(seq_ids, key=lambda key: len(self._prompts[key])):
            length = len(self._prompts[seq_id])
            if batch and length * (len(batch) + 1) > self._steps.max_num_batched_tokens:
                yield batch
                batch = []
            batch.append(seq_id)
        if batch:
            yield batch

    def _embed(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Pooled states fp32 [B, hidden] of B prompts."""
        longest = max(map(len, prompts))
        padding = self._pad_token_id
        ids = torch.tensor([[*ids, *[padding] * (longest - len(ids))] for ids in prompts])
        lengths = torch.tensor([len(ids) for ids in prompts])
        mask = (torch.arange(longest) < lengths[:, None]).to(self._device)
        output = self._model(input_ids=ids.to(self._device), attention_mask=mask.long())
        states: Tensor = output.last_hidden_state.float()
        match self._pooling:
            case Pooling.CLS:
                return states[:, 0]
            case Pooling.LAST:
                return states[torch.arange(len(prompts)), lengths - 1]
            case Pooling.MEAN:
                # The sum has the direction of the mean.
                return (states * mask[..., None]).sum(1)


def _load(checkpoint: EncoderCheckpoint, load: LoadConfig) -> Any:  # noqa: ANN401 - untyped library
    # Importing it takes seconds, which only encoders have to spend.
    from transformers import AutoConfig, AutoModel  # noqa: PLC0415

    dtype = "auto" if load.dtype is DType.AUTO else load.dtype.value
    directory = checkpoint.directory
    if not load.needs_weights:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        return AutoModel.from_config(config)
    try:
        model, report = AutoModel.from_pretrained(
            directory,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # the library raises all kinds for damaged files
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{directory}: the weights cannot be loaded ({reason})") from error
    # A pooling layer on top, which some models have and some files lack, is not used.
    missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    if missing:
        raise CheckpointError(f"{directory}: the checkpoint lacks {missing[0]}")
    return model
