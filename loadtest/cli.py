"""Command line of the load test: `octavo bench serve`."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Unpack

import click
import httpx
import numpy as np
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.loadtest.client import (
    RequestResult,
    ServerError,
    Target,
    first_model,
    metrics_text,
    open_client,
    run,
    send,
    text_token_ids,
)
from octavo.loadtest.memory.group import memory
from octavo.loadtest.offline.commands import latency
from octavo.loadtest.options import BenchOptions, bench_options
from octavo.loadtest.overhead import measure, null_server
from octavo.loadtest.report import Report, ReportOptions, RunSettings
from octavo.loadtest.speculation import SpeculationCounts
from octavo.loadtest.workload import (
    Lengths,
    Prefixes,
    Prompt,
    Vocabulary,
    arrival_times,
    custom_prompts,
    prefix_repetition_prompts,
    random_prompts,
    sharegpt_prompts,
)

_DEFAULT_OUTPUT_LEN = 128
_ERRORS_SHOWN = 3


@click.group()
def bench() -> None:
    """Measure a running server, or the engine and its kernels in this process."""


bench.add_command(latency)
bench.add_command(memory)


@bench.command()
@bench_options
def serve(**options: Unpack[BenchOptions]) -> None:
    """Send many requests to a running OpenAI-compatible server and report its speed.

    The server may be any: only HTTP is spoken. Times are taken by this client, so leave it a
    processor core of its own where you can.
    """
    if options["dataset_name"] in ("sharegpt", "custom") and options["dataset_path"] is None:
        raise click.UsageError(f"--dataset-name {options['dataset_name']} needs --dataset-path")
    try:
        report = asyncio.run(_measure(options))
    except (ServerError, ValueError, httpx.InvalidURL) as error:
        raise click.ClickException(str(error)) from error
    click.echo(report.render())
    for message in report.errors[:_ERRORS_SHOWN]:
        click.echo(f"failed: {message}", err=True)
    if options["save_result"] or options["save_detailed"]:
        path = _save(report, options)
        click.echo(f"result written to {path}", err=True)
    if not report.completed:
        sys.exit(1)


@bench.command()
@click.option("--endpoint", default="/v1/chat/completions", show_default=True, help="Route.")
@click.option("--streams", default=32, show_default=True, help="Streams side by side.")
@click.option("--output-len", default=500, show_default=True, help="Tokens of each stream.")
@click.option("--rounds", default=5, show_default=True, help="Repetitions; each gives a line.")
@click.argument("serve_args", nargs=-1, metavar="[MODEL] [-- SERVE FLAGS]")
def overhead(
    endpoint: str, streams: int, output_len: int, rounds: int, serve_args: tuple[str, ...]
) -> None:
    """Measure all that is not the model: HTTP, templates, text and JSON per streamed token.

    Starts a server of its own without a model (tokenizer and template are those of MODEL) and
    gives it one processor core; needs Linux.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    try:
        with null_server(serve_args, cores[0]) as (port, pid):
            # The first round is warm-up.
            for number in range(rounds + 1):
                result = measure(port, pid, endpoint, streams, output_len)
                if number:
                    click.echo(result.render())
    except ServerError as error:
        raise click.ClickException(str(error)) from error


async def _measure(options: BenchOptions) -> Report:
    headers = dict(options["header"])
    if options["api_key"]:
        headers["authorization"] = f"Bearer {options['api_key']}"
    async with open_client(options["base_url"], headers) as client:
        target = Target(
            path=options["endpoint"],
            model=options["model"] or await first_model(client),
            ignore_eos=options["ignore_eos"],
            temperature=options["temperature"],
            extra_body=options["extra_body"],
        )
        rng = np.random.default_rng(options["seed"])
        count = options["num_prompts"] + options["num_warmups"]
        prompts = _draw_prompts(options, rng, count, await _vocabulary(client, target, options))
        arrivals = arrival_times(
            rng, options["num_prompts"], options["request_rate"], options["burstiness"]
        )
        send_one = partial(send, client, target)
        # Warm-ups have prompts of their own, so that none of the measured ones is cached.
        await _warm_up(send_one, prompts[options["num_prompts"] :], options)
        before = SpeculationCounts.from_metrics(await metrics_text(client))
        with _progress(options["num_prompts"]) as on_result:
            results, duration = await run(
                send_one,
                prompts[: options["num_prompts"]],
                arrivals,
                options["max_concurrency"],
                on_result,
            )
        after = SpeculationCounts.from_metrics(await metrics_text(client))
    shown = ReportOptions(
        options["percentile_metrics"], options["metric_percentiles"], options["goodput"]
    )
    return Report(_settings(options, target), shown, results, duration, after.since(before))


async def _vocabulary(
    client: httpx.AsyncClient, target: Target, options: BenchOptions
) -> Vocabulary:
    """Ids where the route takes them and the server's are known, else words."""
    if options["dataset_name"] in ("sharegpt", "custom") or target.is_chat:
        return Vocabulary.of_words()
    if options["vocab_size"]:
        return Vocabulary(range(options["vocab_size"]))
    ids = await text_token_ids(client, target.model)
    return Vocabulary(ids) if ids else Vocabulary.of_words()


def _draw_prompts(
    options: BenchOptions, rng: np.random.Generator, count: int, vocabulary: Vocabulary
) -> list[Prompt]:
    output_len = options["output_len"]
    path = options["dataset_path"] or Path()
    match options["dataset_name"]:
        case "sharegpt":
            return sharegpt_prompts(rng, path, count, output_len)
        case "custom":
            return custom_prompts(path, count, output_len)
        case "prefix_repetition":
            prefixes = Prefixes(
                options["prefix_repetition_num_prefixes"],
                options["prefix_repetition_prefix_len"],
                options["prefix_repetition_suffix_len"],
            )
            return prefix_repetition_prompts(
                rng, vocabulary, count, prefixes, output_len or _DEFAULT_OUTPUT_LEN
            )
    lengths = Lengths(
        options["input_len"], output_len or _DEFAULT_OUTPUT_LEN, options["random_range_ratio"]
    )
    return random_prompts(rng, vocabulary, count, lengths)


async def _warm_up(
    send_one: Callable[[Prompt], Awaitable[RequestResult]],
    prompts: Sequence[Prompt],
    options: BenchOptions,
) -> None:
    if not prompts:
        return
    results, _ = await run(
        send_one, prompts, [0.0] * len(prompts), options["max_concurrency"], lambda _: None
    )
    for result in results:
        if result.error:
            raise ServerError(f"a warm-up request failed: {result.error}")


def _progress(total: int) -> AbstractContextManager[Callable[[RequestResult], None]]:
    """A progress bar on a terminal; gives the function to call with each result."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return nullcontext(lambda _: None)
    return _Bar(console, total)


class _Bar:
    """A bar of finished requests, with the number of those that failed."""

    def __init__(self, console: Console, total: int) -> None:
        # Seldom redrawn: the time it takes is taken from the measuring.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=2,
        )
        self._task = self._progress.add_task("requests", total=total)
        self._failed = 0

    def __enter__(self) -> Callable[[RequestResult], None]:
        self._progress.start()
        return self._on_result

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _on_result(self, result: RequestResult) -> None:
        self._failed += bool(result.error)
        text = f"requests ({self._failed} failed)" if self._failed else "requests"
        self._progress.update(self._task, advance=1, description=text)


def _settings(options: BenchOptions, target: Target) -> RunSettings:
    return RunSettings(
        date=datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        backend="openai-chat" if target.is_chat else "openai",
        label=options["label"],
        model_id=target.model,
        tokenizer_id=options["tokenizer"] or target.model,
        num_prompts=options["num_prompts"],
        request_rate=options["request_rate"],
        burstiness=options["burstiness"],
        max_concurrency=options["max_concurrency"],
    )


def _save(report: Report, options: BenchOptions) -> Path:
    value = report.to_json(options["save_detailed"])
    name = options["result_filename"]
    if name is None:
        model = str(value["model_id"]).rsplit("/", 1)[-1]
        label = options["label"] or value["backend"]
        concurrency = options["max_concurrency"]
        suffix = f"-concurrency{concurrency}" if concurrency else ""
        name = f"{label}-{value['request_rate']}qps{suffix}-{model}-{value['date']}.json"
    path = options["result_dir"] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2))
    return path
