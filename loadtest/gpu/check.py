"""One run: correct kernels, their speed, two models, peers; a table and a file of JSON."""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.config.model import ModelConfig
from octavo.loadtest.gpu.correctness import check_kernels
from octavo.loadtest.gpu.models import measure_model
from octavo.loadtest.gpu.rows import measure_rows
from octavo.loadtest.gpu.shapes import DRY, GPU, Plan
from octavo.loadtest.gpu.speed import measure_kernels
from octavo.loadtest.gpu.sweep import Swept, sweep_tiles
from octavo.loadtest.offline.ceilings import Ceilings, measure_ceilings
from octavo.loadtest.output import check_file


def run(plan: Plan, result: dict[str, Any]) -> None:
    """Adds all figures to `result`; writes each line as it comes."""
    started = time.monotonic()
    result |= {"device": _device_name(plan), "torch": torch.__version__}
    ceilings = measure_ceilings(
        getattr(torch, plan.dtype), torch.device(plan.device), torch.get_num_threads()
    )
    result["ceilings"] = asdict(ceilings)
    _say(ceilings.render())
    result["failed"] = {}
    parts: list[tuple[str, str, Callable[[Plan, Ceilings, list[Any]], None]]] = [
        ("checks", "checks", _check),
        ("kernels", "kernels", _measure_kernels),
        ("tiles", "tiles", _sweep),
        *((facts.model_type, "models", partial(_measure_model, facts)) for facts in plan.models),
        ("peers", "peers", _measure_peers),
    ]
    for name, group, part in parts:
        try:
            part(plan, ceilings, result.setdefault(group, []))
        except Exception:  # whatever it is must not cost the other parts, since GPU time is short
            result["failed"][name] = traceback.format_exc()
            _say(f"FAILED {name}:\n{result['failed'][name]}")
    result["seconds"] = time.monotonic() - started
    result["ok"] = (
        not result["failed"]
        and all(check["ok"] for check in result["checks"])
        and not any(model["compiled_late"] for model in result["models"])
    )


def _check(plan: Plan, ceilings: Ceilings, checks: list[Any]) -> None:
    for name, error, limit in check_kernels(plan):
        checks.append({"name": name, "error": error, "limit": limit, "ok": error <= limit})
        if error > limit:
            _say(f"WRONG {name}: error {error:.2e}, allowed {limit:.2e}")
    wrong = sum(not check["ok"] for check in checks)
    _say(f"{len(checks)} checks against float64, {wrong} wrong")


def _measure_kernels(plan: Plan, ceilings: Ceilings, figures: list[Any]) -> None:
    for figure in chain(measure_kernels(plan, ceilings), measure_rows(plan, ceilings)):
        figures.append(figure._asdict())
        _say(
            f"{figure.name:<24} {figure.microseconds:>10.1f} us {figure.reached:>9.1f} "
            f"{figure.unit:<8} {figure.share:>6.1%}"
        )


def _sweep(plan: Plan, ceilings: Ceilings, tiles: list[Any]) -> None:
    for swept in sweep_tiles(plan, ceilings):
        tiles.append(_swept_json(swept))
        _say(_swept_line(swept))


def _measure_model(facts: ModelConfig, plan: Plan, ceilings: Ceilings, models: list[Any]) -> None:
    model = measure_model(plan, facts, ceilings)
    models.append(model.as_json())
    _say(
        f"{model.name}: {model.kv_blocks} KV blocks, prefill {model.prefill_tflops:.1f} "
        f"TFLOP/s, compiled while serving: {', '.join(model.compiled_late) or 'nothing'}"
    )
    for decode in model.decodes:
        _say(
            f"  batch {decode.batch:<4} {decode.step_ms:>8.3f} ms a step "
            f"{decode.tokens_per_second:>9.0f} tokens/s {decode.share:>6.1%} of the limit"
        )


def _measure_peers(plan: Plan, ceilings: Ceilings, peers: list[Any]) -> None:
    facts, batch = plan.models[-1], plan.model_batches[1]
    rate = _transformers(plan, facts)
    peers.append({"name": "transformers", "batch": batch, "tokens_per_second": rate})
    _say(f"transformers generate, {facts.model_type}, batch {batch}: {rate:.0f} tokens/s")


def _swept_json(swept: Swept) -> dict[str, Any]:
    return {
        "name": swept.name,
        "tiles": [
            {**asdict(tiles), "figure": None if figure is None else figure._asdict()}
            for tiles, figure in swept.figures.items()
        ],
    }


def _swept_line(swept: Swept) -> str:
    if swept.best is None:
        return f"tiles {swept.name:<20} none fits"
    tiles, figure = swept.best
    return (
        f"tiles {swept.name:<18} best of {len(swept.figures)}: {tiles.rows}x{tiles.tile}, "
        f"{tiles.num_warps} warps, {tiles.num_stages} stages: {figure.microseconds:.1f} us "
        f"{figure.reached:.1f} {figure.unit} {figure.share:.1%}"
    )


def _transformers(plan: Plan, facts: ModelConfig) -> float:
    """Generated tokens per second of transformers with the same shape, random weights too."""
    config = AutoConfig.for_model(
        facts.model_type,
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        num_hidden_layers=facts.num_layers,
        num_attention_heads=facts.num_heads,
        num_key_value_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
    )
    with torch.device(plan.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, plan.dtype)).eval()
    batch = plan.model_batches[1]
    ids = torch.ones((batch, plan.model_prompt), dtype=torch.int64, device=plan.device)
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    best = float("inf")
    for _ in range(2):
        started = time.perf_counter()
        model.generate(
            ids, min_new_tokens=plan.model_output, max_new_tokens=plan.model_output, **options
        )
        best = min(best, time.perf_counter() - started)
    return batch * plan.model_output / best


def _device_name(plan: Plan) -> str:
    return torch.cuda.get_device_name() if plan.device == "cuda" else "CPU (dry run)"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Runs and writes the file; 1 where a kernel is wrong or one was compiled while serving."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny shapes on CPU")
    parser.add_argument("--output", type=Path, default=Path("results/gpu_check.json"))
    options = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        _say("no usable GPU was found; --dry runs tiny shapes on CPU")
        return 2
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        check_file(options.output)
    except OSError as error:
        parser.error(f"--output {options.output} cannot be written: {error.strerror}")
    result: dict[str, Any] = {}
    try:
        run(DRY if options.dry else GPU, result)
    finally:
        # What was measured before an interruption counts.
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _say(f"{result['seconds']:.0f} s; {options.output}; {'ok' if result['ok'] else 'FAILED'}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
