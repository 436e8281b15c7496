"""The baseline: transformers' generate over padded batches that start and end together."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import transformers

from octavo.config.load import DType
from octavo.loadtest.memory.engine import ModelChoice, Run
from octavo.loadtest.workload import Prompt

# Of the lengths of a batch, for finding out which precision suits transformers.
_TRIAL_SHARE = 8


def fastest_dtype(choice: ModelChoice, batch: Sequence[Prompt]) -> DType:
    """The precision in which transformers answers this batch, shortened, in the least time."""
    trial = []
    for prompt in batch:
        assert isinstance(prompt.content, list)
        length = max(1, prompt.input_len // _TRIAL_SHARE)
        output_len = max(2, prompt.output_len // _TRIAL_SHARE)
        trial.append(
            replace(
                prompt, content=prompt.content[:length], input_len=length, output_len=output_len
            )
        )
    rates = {}
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        baseline = StaticBatches(choice, dtype)
        baseline.run([replace(prompt, output_len=2) for prompt in trial], len(trial))
        rates[dtype] = baseline.run(trial, len(trial)).output_rate
    return max(rates, key=lambda dtype: rates[dtype])


class StaticBatches:
    """A model of transformers that answers requests batch by batch, in their order.

    A batch is padded to its longest prompt and runs until its longest answer is complete.
    """

    def __init__(self, choice: ModelChoice, dtype: DType) -> None:
        """Load the checkpoint; on CPU with a thread for each core."""
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        transformers.utils.logging.disable_progress_bar()
        checkpoint = choice.checkpoint()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.tokenizer_dir, dtype=dtype.value, local_files_only=True
        )
        self._model = model.to(device).eval()
        self._device = device
        # Nothing ends a text, and the fill value of padding is masked anyhow.
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False, pad_token_id=0, eos_token_id=None, use_cache=True
        )

    def run(self, prompts: Sequence[Prompt], batch_size: int) -> Run:
        """Answer all prompts; only the tokens that were asked for are counted."""
        result = Run(num_prompt_tokens=sum(prompt.input_len for prompt in prompts))
        begin = time.perf_counter()
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            self._generate(batch)
            result.num_output_tokens += sum(prompt.output_len for prompt in batch)
        result.seconds = time.perf_counter() - begin
        return result

    @torch.inference_mode()
    def _generate(self, batch: Sequence[Prompt]) -> None:
        longest = max(prompt.input_len for prompt in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(batch):
            ids[row, longest - prompt.input_len :] = torch.tensor(prompt.content)
            mask[row, longest - prompt.input_len :] = 1
        output = self._model.generate(
            ids.to(self._device),
            attention_mask=mask.to(self._device),
            max_new_tokens=max(prompt.output_len for prompt in batch),
        )
        assert output.shape[1] == longest + max(prompt.output_len for prompt in batch)
