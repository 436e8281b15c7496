"""How many tokens and sequences a step may hold."""

from typing import Literal

from pydantic import Field

from octavo.config.base import ConfigModel


class SchedulerConfig(ConfigModel):
    """Limits of one step and the order of the queue."""

    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        description="Most sequences in one step; default: 1024 from 70 GiB of GPU memory, "
        "256 below, 128 on CPU.",
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens in one step; default: 8192 from 70 GiB of GPU memory, else 2048; "
        "on CPU as many as a prompt computes in 0.2 s, 128 to 2048.",
    )
    long_prefill_token_threshold: int = Field(
        default=0, ge=0, description="Most tokens of one prompt in one step; 0 is no cap."
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs", description="Order of the waiting queue: arrival, or priority first."
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = Field(
        default="auto",
        description="How a sequence gives way when blocks run out: computed again later, "
        "swapped to host memory, or what was measured to be cheaper.",
    )
