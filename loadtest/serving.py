"""The measurement of a running server: prompts are drawn, sent at their times, and reported."""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from functools import partial

import httpx
import numpy as np
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
from octavo.loadtest.dataset import FILE_DATASETS, draw_prompts
from octavo.loadtest.options import BenchOptions
from octavo.loadtest.report import Report, ReportOptions, RunSettings
from octavo.loadtest.speculation import SpeculationCounts
from octavo.loadtest.workload import Prompt, Vocabulary, arrival_times

_SEEDS = 1 << 32


def fresh_seed() -> int:
    """A number that no run before has had: its prompts are in no server's prefix cache."""
    return secrets.randbelow(_SEEDS)


async def measure(
    options: BenchOptions, seed: int, on_report: Callable[[Report], None]
) -> list[Report]:
    """Measure once, or for each value of the sweep; every report is also told when it is there.

    Raises ServerError for a server that cannot be measured, ValueError for a bad data set.
    """
    headers = dict(options["header"])
    if options["api_key"]:
        headers["authorization"] = f"Bearer {options['api_key']}"
    reports = []
    async with open_client(options["base_url"], headers) as client:
        target = Target(
            path=options["endpoint"],
            model=options["model"] or await first_model(client),
            ignore_eos=options["ignore_eos"],
            temperature=options["temperature"],
            extra_body=options["extra_body"],
        )
        vocabulary = await _vocabulary(client, target, options)
        rng = np.random.default_rng(seed)
        runs: Sequence[int | None] = options["concurrency_sweep"] or [options["max_concurrency"]]
        for concurrency in runs:
            settings = _settings(options, target, concurrency, seed)
            reports.append(await _measure_once(options, settings, vocabulary, rng, client, target))
            on_report(reports[-1])
    return reports


async def _measure_once(
    options: BenchOptions,
    settings: RunSettings,
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    client: httpx.AsyncClient,
    target: Target,
) -> Report:
    number = options["num_prompts"]
    prompts = draw_prompts(options, rng, number + options["num_warmups"], vocabulary)
    arrivals = arrival_times(rng, number, options["request_rate"], options["burstiness"])
    send_one = partial(send, client, target)
    concurrency = settings.max_concurrency
    # Warm-ups have prompts of their own, so that none of the measured ones is cached.
    await _warm_up(send_one, prompts[number:], concurrency)
    before = SpeculationCounts.from_metrics(await metrics_text(client))
    with _progress(number) as on_result:
        results, duration = await run(send_one, prompts[:number], arrivals, concurrency, on_result)
    after = SpeculationCounts.from_metrics(await metrics_text(client))
    shown = ReportOptions(
        options["percentile_metrics"], options["metric_percentiles"], options["goodput"]
    )
    return Report(settings, shown, results, duration, after.since(before))


async def _vocabulary(
    client: httpx.AsyncClient, target: Target, options: BenchOptions
) -> Vocabulary:
    """Ids where the route takes them and the server's are known, else words."""
    if options["dataset_name"] in FILE_DATASETS or options["text_prompts"] or target.is_chat:
        return Vocabulary.of_words()
    if options["vocab_size"]:
        return Vocabulary(range(options["vocab_size"]))
    ids = await text_token_ids(client, target.model)
    return Vocabulary(ids) if ids else Vocabulary.of_words()


async def _warm_up(
    send_one: Callable[[Prompt], Awaitable[RequestResult]],
    prompts: Sequence[Prompt],
    max_concurrency: int | None,
) -> None:
    if not prompts:
        return
    results, _ = await run(send_one, prompts, [0.0] * len(prompts), max_concurrency, lambda _: None)
    for result in results:
        if result.error:
            raise ServerError(f"a warm-up request failed: {result.error}")


def _settings(
    options: BenchOptions, target: Target, concurrency: int | None, seed: int
) -> RunSettings:
    return RunSettings(
        date=datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        backend="openai-chat" if target.is_chat else "openai",
        label=options["label"],
        model_id=target.model,
        tokenizer_id=options["tokenizer"] or target.model,
        num_prompts=options["num_prompts"],
        request_rate=options["request_rate"],
        burstiness=options["burstiness"],
        max_concurrency=concurrency,
        seed=seed,
    )


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
