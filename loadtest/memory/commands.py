"""Command line of the benchmarks of memory: `octavo bench memory`."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import click
import numpy as np

from octavo.config.load import DType
from octavo.engine.core.errors import ConfigurationError
from octavo.loadtest.memory import block_sizes as sizes
from octavo.loadtest.memory.engine import CacheShape, ModelChoice, make_engine, run
from octavo.loadtest.memory.occupancy import Occupancy
from octavo.loadtest.memory.report import Goal, heading, line
from octavo.loadtest.memory.sharing import (
    SharingSizes,
    make_sharing_engine,
    measure_sharing,
    sharing_cases,
)
from octavo.loadtest.memory.static_batching import StaticBatches, fastest_dtype
from octavo.loadtest.memory.throughput import compare_caching, measure_zero_hits
from octavo.loadtest.memory.workload import (
    Beginnings,
    conversation_lengths,
    conversations,
    with_shared_beginnings,
)
from octavo.loadtest.workload import (
    Lengths,
    Prefixes,
    Prompt,
    prefix_repetition_prompts,
    random_prompts,
)

_COUNT = click.IntRange(min=1)
_SCALE = click.FloatRange(min=0, min_open=True, max=4)


@click.group()
def commands() -> None:
    """Found by name from `octavo.loadtest.memory.group`."""


def _count(name: str, default: int, text: str) -> Callable[..., Any]:
    return click.option(name, type=_COUNT, default=default, show_default=True, help=text)


def _command(function: Callable[..., None]) -> click.Command:
    """A subcommand with the options that all have."""

    @wraps(function)
    def guarded(model: str | None, dtype: str, **options: Any) -> None:  # noqa: ANN401 - click's
        try:
            function(ModelChoice(model, DType(dtype)), **options)
        except (ConfigurationError, ValueError) as error:
            raise click.ClickException(str(error)) from error

    for option in (
        click.option(
            "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draws."
        ),
        click.option(
            "--dtype",
            type=click.Choice([dtype.value for dtype in DType]),
            default=DType.AUTO.value,
            show_default=True,
            help="Precision; auto takes that of the checkpoint.",
        ),
        click.option("--model", help="Directory, GGUF file or hub id. [default: starter model]"),
    ):
        guarded = option(guarded)
    return commands.command()(guarded)


_scale = click.option(
    "--scale", type=_SCALE, default=1.0, show_default=True, help="Factor on all mean lengths."
)


@_command
@_count("--num-prompts", 512, "Number of requests.")
@_count("--cache-tokens", 32768, "Size of the cache in tokens.")
@_count("--max-model-len", 2048, "Longest context in tokens.")
@_count("--block-size", 16, "Tokens of a block.")
def waste(
    choice: ModelChoice,
    num_prompts: int,
    cache_tokens: int,
    max_model_len: int,
    block_size: int,
    seed: int,
) -> None:
    """Unused memory on a mix like ShareGPT's, against one contiguous piece for each request.

    Only blocks are counted; no model is run.
    """
    rng = np.random.default_rng(seed)
    null = replace(choice, weights=False)
    lengths = conversation_lengths(rng, num_prompts, max_model_len)
    prompts = conversations(rng, null.vocabulary(), lengths)
    occupancy = Occupancy()
    shape = CacheShape(cache_tokens, max_model_len, block_size)
    run(make_engine(null, shape), prompts, occupancy)
    click.echo(heading("Memory waste"))
    click.echo(line("Requests", num_prompts))
    click.echo(line("Mean prompt (tokens)", float(np.mean([pair[0] for pair in lengths]))))
    click.echo(line("Mean answer (tokens)", float(np.mean([pair[1] for pair in lengths]))))
    click.echo(line("Steps", occupancy.num_steps))
    click.echo(line("Wasted, paged", 100 * occupancy.waste, " %", Goal(4, True, " %")))
    contiguous = 100 * occupancy.contiguous_waste(max_model_len)
    click.echo(line(f"Wasted, {max_model_len} contiguous slots each (computed)", contiguous, " %"))
    click.echo(line("Requests at once, paged (mean)", occupancy.running / occupancy.num_steps))
    click.echo(line("Requests at once, contiguous", cache_tokens // max_model_len))


@_command
@_count("--input-len", 220, "Tokens of each prompt with choices or beams.")
@_count("--output-len", 180, "Tokens of each choice or beam.")
@_count("--num-requests", 2, "Requests with choices or beams that run at once.")
@_count("--system-len", 768, "Tokens of the system prompt.")
@_count("--own-len", 32, "Tokens of each prompt after the system prompt.")
@_count("--system-output-len", 32, "Tokens of each answer after a system prompt.")
@_count("--num-system-requests", 32, "Requests with the same system prompt.")
def sharing(choice: ModelChoice, seed: int, **options: int) -> None:
    """Blocks saved by sharing, against a table of own blocks for each sequence."""
    rng = np.random.default_rng(seed)
    shape = SharingSizes(
        Lengths(options["input_len"], options["output_len"]),
        options["num_requests"],
        Prefixes(1, options["system_len"], options["own_len"]),
        options["system_output_len"],
        options["num_system_requests"],
    )
    cases = sharing_cases(rng, choice.vocabulary(), shape)
    click.echo(heading("Memory saved by sharing"))
    for case, result in measure_sharing(make_sharing_engine(choice, shape), cases):
        click.echo(line(f"{case.name}, saved over all steps", 100 * result.saved, " %"))
        click.echo(line("  most blocks held at once", result.peak_held))
        click.echo(line("  most blocks at once without sharing", result.peak_unshared))


@_command
@_count("--shared-len", 768, "Tokens that all prompts of a round begin with.")
@_count("--own-len", 32, "Tokens of each prompt after them.")
@_count("--output-len", 32, "Tokens of each answer.")
@_count("--num-prompts", 16, "Requests in a round.")
@_count("--rounds", 2, "Rounds that are measured, after one that is not.")
def prefix(
    choice: ModelChoice,
    shared_len: int,
    own_len: int,
    output_len: int,
    num_prompts: int,
    rounds: int,
    seed: int,
) -> None:
    """Throughput with a shared prefix, with prefix caching and without. No round knows another."""
    rng, vocabulary = np.random.default_rng(seed), choice.vocabulary()

    def draw() -> list[Prompt]:
        prefixes = Prefixes(1, shared_len, own_len)
        return prefix_repetition_prompts(rng, vocabulary, num_prompts, prefixes, output_len)

    longest = shared_len + own_len + output_len
    shape = CacheShape(num_prompts * (longest + 32), longest)
    pairs = list(compare_caching(choice, shape, draw, rounds))
    for pair in pairs:
        click.echo(heading("Shared prefix"))
        click.echo(line("Tokens/s, caching", pair.cached.output_rate))
        click.echo(line("Tokens/s, no caching", pair.uncached.output_rate))
        click.echo(line("Prompt tokens from the cache", 100 * pair.cached.hit_rate, " %"))
        click.echo(line("Times as fast", pair.speedup, "", Goal(3, False, "")))


@_command
@_count("--input-len", 220, "Tokens of each prompt.")
@_count("--output-len", 64, "Tokens of each answer.")
@_count("--num-prompts", 16, "Requests in a round.")
@_count("--rounds", 3, "Rounds with the model, after one that is not counted.")
@_count("--host-rounds", 20, "Rounds without a model, after one that is not counted.")
def zero_hits(
    choice: ModelChoice,
    input_len: int,
    output_len: int,
    num_prompts: int,
    rounds: int,
    host_rounds: int,
    seed: int,
) -> None:
    """What prefix caching costs when no prompt has been seen before."""
    rng, vocabulary = np.random.default_rng(seed), choice.vocabulary()

    def draw() -> list[Prompt]:
        return random_prompts(rng, vocabulary, num_prompts, Lengths(input_len, output_len))

    longest = input_len + output_len
    shape = CacheShape(num_prompts * (longest + 32), longest)
    result = measure_zero_hits(choice, shape, draw, rounds, host_rounds)
    click.echo(heading("Prefix caching at zero hits"))
    click.echo(line("A round with the model (ms)", 1000 * result.model_seconds))
    click.echo(line("Bookkeeping added to a round (ms)", 1000 * result.host_seconds))
    click.echo(
        line("Bookkeeping added to a token (ns)", 1e9 * result.host_seconds / result.num_tokens)
    )
    click.echo(line("Throughput lost by it", 100 * result.lost, " %", Goal(1, True, " %")))
    click.echo(
        line("Throughput lost, rounds with the model (median)", 100 * result.directly_lost, " %")
    )


@_command
@_count("--num-prompts", 24, "Number of requests.")
@_count("--cache-tokens", 16384, "Memory of both sides, in tokens of the cache.")
@_count("--max-model-len", 2048, "Longest context in tokens.")
@_scale
@click.option(
    "--batch-size", type=_COUNT, help="Of the baseline. [default: what contiguous memory holds]"
)
@click.option(
    "--baseline-dtype",
    type=click.Choice([dtype.value for dtype in DType]),
    help="Precision of the baseline. [default: the faster one of float32 and bfloat16]",
)
def static(choice: ModelChoice, seed: int, **options: Any) -> None:  # noqa: ANN401 - click's
    """Throughput against static batching: transformers' generate over padded batches.

    Both answer the same requests with the same memory. The baseline reserves the longest context
    for each row of a batch.
    """
    rng = np.random.default_rng(seed)
    cache_tokens, max_model_len = options["cache_tokens"], options["max_model_len"]
    lengths = conversation_lengths(
        rng, options["num_prompts"], max_model_len, scale=options["scale"]
    )
    prompts = conversations(rng, choice.vocabulary(), lengths)
    batch_size = options["batch_size"] or max(1, cache_tokens // max_model_len)
    short = [replace(prompt, output_len=2) for prompt in prompts[:2]]
    dtype = options["baseline_dtype"] or fastest_dtype(choice, prompts[:batch_size])
    baseline = StaticBatches(choice, DType(dtype))
    baseline.run(short, 2)
    theirs = baseline.run(prompts, batch_size)
    del baseline
    engine = make_engine(choice, CacheShape(cache_tokens, max_model_len))
    run(engine, short)
    engine.reset_prefix_cache()
    occupancy = Occupancy()
    ours = run(engine, prompts, occupancy)
    click.echo(heading("Static batching"))
    click.echo(line("Requests", len(prompts)))
    click.echo(line("Tokens asked for", ours.num_output_tokens))
    click.echo(line("Rows of a static batch", batch_size))
    click.echo(f"Precision of the static batches: {DType(dtype).value}")
    click.echo(line("Most requests at once, paged", occupancy.peak_running))
    click.echo(line("Tokens/s, static batches", theirs.output_rate))
    click.echo(line("Tokens/s, paged and continuous", ours.output_rate))
    ratio = ours.output_rate / theirs.output_rate
    click.echo(line("Times as fast", ratio, "", Goal(3, False, "")))


@_command
@_count("--num-prompts", 256, "Requests for the counts of blocks.")
@_count("--num-timed-prompts", 16, "Requests that the model answers for each size.")
@_count("--cache-tokens", 32768, "Size of the cache in tokens.")
@_count("--max-model-len", 2048, "Longest context in tokens.")
@_count("--num-beginnings", 8, "Beginnings that prompts share.")
@_count("--beginning-len", 300, "Tokens of the longest one; the shortest has a sixth.")
@_scale
@click.option("--no-model", is_flag=True, help="Count blocks only.")
def block_sizes(choice: ModelChoice, seed: int, **options: Any) -> None:  # noqa: ANN401 - click's
    """Waste, hits, table size and throughput for blocks of 8 to 128 tokens.

    The requests have the lengths of conversations, after beginnings that several share.
    """
    longest = options["max_model_len"]
    shared = Beginnings(options["num_beginnings"], options["beginning_len"])

    def draw(count: int) -> list[Prompt]:
        rng, vocabulary = np.random.default_rng(seed), choice.vocabulary()
        lengths = conversation_lengths(rng, count, longest - shared.longest, options["scale"])
        prompts = conversations(rng, vocabulary, lengths)
        return with_shared_beginnings(rng, vocabulary, prompts, shared)

    counted, timed = draw(options["num_prompts"]), draw(options["num_timed_prompts"])
    click.echo(heading("Block sizes"))
    click.echo("block   waste %   hits %   table entries   host ms/request   tokens/s")
    for block_size in sizes.SIZES:
        shape = CacheShape(options["cache_tokens"], longest, block_size)
        result = sizes.measure_accounting(choice, shape, counted)
        speed = "-" if options["no_model"] else f"{sizes.measure_speed(choice, shape, timed):.1f}"
        click.echo(
            f"{block_size:5}{100 * result.waste:10.2f}{100 * result.hit_rate:9.1f}"
            f"{result.table_entries:16}{1000 * result.host_seconds:18.2f}{speed:>11}"
        )
