"""`octavo bench kernels`: each kernel at a model's sizes, beside what the machine can do."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from octavo.config.engine import EngineConfig
from octavo.config.env import num_cores
from octavo.engine.core.errors import ConfigurationError
from octavo.engine.loader import EncoderCheckpoint, resolve_checkpoint
from octavo.engine.worker.memory import resolve_device, resolve_dtype
from octavo.kernels import ops
from octavo.loadtest.offline.ceilings import Ceilings, measure_ceilings
from octavo.loadtest.offline.clock import best_seconds
from octavo.loadtest.offline.kernel_cases import KernelCase, KernelCases

# Calls are timed in groups that last this long, so that reading the clock costs nothing.
_GROUP_SECONDS = 0.02
_GROUPS = 5
_MOST_CALLS = 2000
_COLUMNS = (
    f"{'kernel':<20} {'shape':<32} {'us':>10} {'GB/s':>7} {'peak':>5} {'GFLOP/s':>8} {'peak':>5}"
)


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Shapes: tokens of a step, sequences, the tokens each of them has, and names to keep."""

    num_tokens: Sequence[int]
    num_seqs: Sequence[int]
    context: int
    only: str


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel at one shape; the best of several groups of calls."""

    name: str
    shape: str
    microseconds: float
    gb_per_s: float
    gflops: float


@dataclass(frozen=True, slots=True)
class KernelReport:
    """All kernels beside the machine's limits."""

    title: str
    ceilings: Ceilings
    rows: Sequence[KernelRow]

    def render(self) -> str:
        """The printed table."""
        return "\n".join(
            [self.title, self.ceilings.render(), _COLUMNS, *(self._line(row) for row in self.rows)]
        )

    def to_json(self) -> dict[str, Any]:
        """All figures by their names."""
        return {
            "title": self.title,
            "ceilings": asdict(self.ceilings),
            "kernels": [asdict(row) for row in self.rows],
        }

    def _line(self, row: KernelRow) -> str:
        memory = f"{row.gb_per_s / self.ceilings.bandwidth_gb:.0%}"
        compute = f"{row.gflops / self.ceilings.matmul_gflops:.0%}"
        return (
            f"{row.name:<20} {row.shape:<32} {row.microseconds:>10,.1f} {row.gb_per_s:>7,.1f} "
            f"{memory:>5} {row.gflops:>8,.1f} {compute:>5}"
        )


def measure_kernels(
    config: EngineConfig, options: KernelOptions, on_row: Callable[[KernelRow], None]
) -> KernelReport:
    """Measure at the sizes of the configured model, whose weights are not read.

    Raises ConfigurationError for a model that is not a decoder.
    """
    checkpoint = resolve_checkpoint(config.load)
    if isinstance(checkpoint, EncoderCheckpoint):
        raise ConfigurationError(f"{checkpoint.name} is an encoder, which has no kernels of ours")
    facts = checkpoint.model_config
    device = resolve_device(config.device.device)
    dtype = resolve_dtype(config.load.dtype, facts)
    threads = config.device.num_cpu_threads or num_cores()
    ceilings = measure_ceilings(dtype, device, threads)
    if device.type == "cpu":
        ops.set_cpu_threads(dtype, config.device.num_cpu_threads)
    int8 = config.load.quantization == "int8"
    if int8 and not ops.can_quantize(dtype, device):
        raise ConfigurationError("--quantization int8 needs the CPU and its own kernels")
    cases = KernelCases(facts, dtype, device, config.cache.block_size, int8)
    rows = []
    with torch.inference_mode():
        for case in _cases(cases, options):
            rows.append(_measure(case, device))
            on_row(rows[-1])
    dtype_name = str(dtype).removeprefix("torch.")
    title = f"kernels at the sizes of {checkpoint.name}, {dtype_name} on {device.type}"
    return KernelReport(title, ceilings, rows)


def _cases(cases: KernelCases, options: KernelOptions) -> Iterator[KernelCase]:
    context, longest = options.context, max(options.num_tokens)
    groups: list[tuple[str, Iterator[KernelCase]]] = [
        ("linear", cases.linear(options.num_tokens)),
        *(("elementwise", cases.elementwise(tokens)) for tokens in options.num_tokens),
        *(("rotation", cases.rotation(tokens)) for tokens in options.num_tokens),
        *(("attention", cases.attention(seqs, 1, context)) for seqs in options.num_seqs),
        ("attention", cases.attention(1, longest, longest)),
        ("attention", cases.attention(1, longest, longest + context)),
        ("copies", cases.copies(64)),
        *(("sampling", cases.sampling(seqs)) for seqs in options.num_seqs),
    ]
    return chain.from_iterable(group for name, group in groups if options.only in ("", name))


def _measure(case: KernelCase, device: torch.device) -> KernelRow:
    once = best_seconds(case.call, device, 1)
    calls = max(1, min(int(_GROUP_SECONDS / once), _MOST_CALLS))
    seconds = best_seconds(case.call, device, _GROUPS, calls)
    return KernelRow(
        case.name,
        case.shape,
        seconds * 1e6,
        case.num_bytes / seconds / 1e9,
        case.num_operations / seconds / 1e9,
    )
