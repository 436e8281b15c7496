"""Command line of the load test: `octavo bench`."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Unpack

import click
import httpx

from octavo.loadtest.client import ServerError
from octavo.loadtest.compare.command import compare
from octavo.loadtest.dataset import check_dataset, warn_of_unused_file
from octavo.loadtest.memory.group import memory
from octavo.loadtest.offline.commands import kernels, latency, quality, throughput
from octavo.loadtest.options import BenchOptions, bench_options, check_together
from octavo.loadtest.output import check_file, make_folder, write_json, write_output
from octavo.loadtest.overhead import measure as measure_overhead
from octavo.loadtest.overhead import null_server
from octavo.loadtest.plot.page import run_page
from octavo.loadtest.report import Report
from octavo.loadtest.resilience.commands import resilience
from octavo.loadtest.serving import fresh_seed, measure

_ERRORS_SHOWN = 3


@click.group()
def bench() -> None:
    """Measure a running server, or the engine and its kernels in this process."""


for command in (latency, throughput, kernels, quality, compare, memory, resilience):
    bench.add_command(command)


@bench.command()
@bench_options
def serve(**options: Unpack[BenchOptions]) -> None:
    """Send many requests to a running OpenAI-compatible server and report its speed.

    The server may be any: only HTTP is spoken. Times are taken by this client, so leave it a
    processor core of its own where you can.
    """
    try:
        check_dataset(options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    check_together(options)
    _prepare_saving(options)
    warn_of_unused_file(options)
    seed = fresh_seed() if options["seed"] is None else options["seed"]
    click.echo(f"prompts and arrival times: --seed {seed}", err=True)
    try:
        reports = asyncio.run(measure(options, seed, lambda report: _show(report, options)))
    except (ServerError, ValueError, httpx.InvalidURL) as error:
        raise click.ClickException(str(error)) from error
    if path := options["plot"]:
        write_output(path, run_page(reports).encode())
        click.echo(f"charts written to {path}", err=True)
    if not all(report.completed for report in reports):
        sys.exit(1)


def _show(report: Report, options: BenchOptions) -> None:
    click.echo(report.render())
    for message in report.errors[:_ERRORS_SHOWN]:
        click.echo(f"failed: {message}", err=True)
    if options["save_result"] or options["save_detailed"]:
        _save(report, options)


def _prepare_saving(options: BenchOptions) -> None:
    """Refuse a place where the result could not be written; folders are made."""
    if not (options["save_result"] or options["save_detailed"]):
        return
    make_folder(options["result_dir"])
    if (given := options["result_filename"]) is None:
        return
    path = options["result_dir"] / given
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_file(path)
    except OSError as error:
        raise click.BadParameter(
            f"{str(path)!r} cannot be written: {error.strerror}", param_hint="'--result-filename'"
        ) from error


def _save(report: Report, options: BenchOptions) -> None:
    value = report.to_json(options["save_detailed"])
    concurrency = report.settings.max_concurrency
    suffix = f"-concurrency{concurrency}" if concurrency else ""
    if (given := options["result_filename"]) is None:
        model = str(value["model_id"]).rsplit("/", 1)[-1]
        label = (options["label"] or value["backend"]).replace("/", "_")
        name = f"{label}-{value['request_rate']}qps{suffix}-{model}-{value['date']}.json"
    elif options["concurrency_sweep"]:
        name = str(Path(given).with_stem(f"{Path(given).stem}{suffix}"))
    else:
        name = given
    write_json(options["result_dir"] / name, value)


@bench.command()
@click.option("--endpoint", default="/v1/chat/completions", show_default=True, help="Route.")
@click.option("--streams", default=32, show_default=True, help="Streams side by side.")
@click.option("--output-len", default=500, show_default=True, help="Tokens of each stream.")
@click.option("--rounds", default=5, show_default=True, help="Repetitions; each gives a line.")
@click.option(
    "--step-ms",
    default=20.0,
    show_default=True,
    help="Step time of the model for the line on added latency; 0 leaves it out.",
)
@click.argument("serve_args", nargs=-1, metavar="[MODEL] [-- SERVE FLAGS]")
def overhead(
    endpoint: str,
    streams: int,
    output_len: int,
    rounds: int,
    step_ms: float,
    serve_args: tuple[str, ...],
) -> None:
    """Measure all that is not the model: HTTP, templates, text and JSON per streamed token.

    Starts a server of its own without a model (tokenizer and template are those of MODEL) and
    gives it one processor core; needs Linux. First its steps end at once: how many tokens a second
    can be streamed. Then each takes --step-ms: how much later than its end a token arrives.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    try:
        with null_server(serve_args, cores[0]) as (port, pid):
            # The first round is warm-up.
            for number in range(rounds + 1):
                result = measure_overhead(port, pid, endpoint, streams, output_len)
                if number:
                    click.echo(result.render())
        if step_ms > 0:
            paced = (*serve_args, "--null-step-ms", str(step_ms))
            with null_server(paced, cores[0]) as (port, pid):
                measure_overhead(port, pid, endpoint, streams, output_len)
                result = measure_overhead(port, pid, endpoint, streams, output_len)
                click.echo(result.render_added(step_ms / 1000, output_len))
    except ServerError as error:
        raise click.ClickException(str(error)) from error
