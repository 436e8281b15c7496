"""`octavo bench latency`, `throughput`, `kernels` and `quality`: in this process, without a server.

The heavy imports are inside the functions: `octavo bench serve` does not wait for the model's
libraries, and the thread settings must be in place before torch is imported.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import click

from octavo.config.engine import EngineConfig
from octavo.config.env import octavo_variables, set_thread_defaults
from octavo.config.flags import (
    FlagError,
    all_flags,
    build_configs,
    settings_from_options,
    settings_from_variables,
)
from octavo.config.options import flag_option
from octavo.engine.core.errors import ConfigurationError, RequestError
from octavo.loadtest.dataset import check_dataset, warn_of_unused_file
from octavo.loadtest.options import DatasetOptions, dataset_options, positive_numbers
from octavo.loadtest.output import OutputFile, write_json

_COUNT = click.IntRange(min=1)
_OUTPUT_JSON = click.option(
    "--output-json",
    type=OutputFile(),
    help="Write the figures to this file as JSON.",
)


def engine_flags(command: click.Command) -> click.Command:
    """Add MODEL and every flag of `octavo serve` that is about the engine to `command`."""
    model = click.Argument(["model_argument"], metavar="[MODEL]", required=False)
    flags = [
        flag_option(flag)
        for flag in all_flags().values()
        if flag.section != "server" and flag.field != "model"
    ]
    command.params = [model, *command.params, *flags]
    return command


def engine_config(model: str | None, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration that command line and OCTAVO_* variables give.

    Raises click.UsageError for settings that cannot be used.
    """
    given = settings_from_options({**options, "model": model})
    try:
        variables, _ = settings_from_variables(octavo_variables())
        return build_configs({**variables, **given})[1]
    except FlagError as error:
        raise click.UsageError(str(error)) from error


def _numbers(_ctx: click.Context, _param: click.Parameter, value: str) -> list[int]:
    return positive_numbers(value)


@engine_flags
@click.command()
@click.option(
    "--batch-size",
    "batch_sizes",
    default="1,8,32",
    show_default=True,
    callback=_numbers,
    help="Sequences side by side; several numbers, separated by commas, are run in turn.",
)
@click.option(
    "--input-len", type=_COUNT, default=128, show_default=True, help="Tokens of each prompt."
)
@click.option(
    "--output-len",
    type=click.IntRange(min=2),
    default=64,
    show_default=True,
    help="Tokens generated for each prompt.",
)
@click.option(
    "--num-iters", type=_COUNT, default=3, show_default=True, help="Iterations that are measured."
)
@click.option(
    "--num-iters-warmup",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Iterations before them that do not count.",
)
@_OUTPUT_JSON
def latency(
    model_argument: str | None,
    output_json: Path | None,
    batch_sizes: list[int],
    input_len: int,
    output_len: int,
    **options: Any,  # noqa: ANN401 - one per setting
) -> None:
    """Measure single batches in this process, step by step: prefill and decode.

    GFLOP/s and GB/s stand beside what the machine reaches in a plain matrix product and in plain
    reading and copying. With --load-format null all but model and sampler runs, and the engine's
    own time per step stands beside its goal.
    """
    counts = (options.pop("num_iters"), options.pop("num_iters_warmup"))
    config = engine_config(model_argument, options)
    set_thread_defaults()
    from octavo.loadtest.offline.engine import open_engine  # noqa: PLC0415 - see the docstring
    from octavo.loadtest.offline.latency import LatencyOptions, measure_latency  # noqa: PLC0415

    try:
        with open_engine(config) as offline:
            wanted = LatencyOptions(batch_sizes, input_len, output_len, *counts)
            report = measure_latency(offline, wanted)
    except ConfigurationError as error:
        raise click.ClickException(str(error)) from error
    click.echo(report.render())
    write_json(output_json, report.to_json())


@engine_flags
@click.command()
@dataset_options
@_OUTPUT_JSON
def throughput(
    model_argument: str | None,
    output_json: Path | None,
    **options: Any,  # noqa: ANN401 - one per setting
) -> None:
    """Measure a data set in this process: all requests are there from the start.

    Answers are greedy and as long as asked for. The prompts are the same in every run, or those
    of --seed.
    """
    names = DatasetOptions.__annotations__
    dataset = cast("DatasetOptions", {name: options.pop(name) for name in names})
    config = engine_config(model_argument, options)
    try:
        check_dataset(dataset)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    warn_of_unused_file(dataset)
    set_thread_defaults()
    from octavo.loadtest.offline.engine import open_engine  # noqa: PLC0415 - see the docstring
    from octavo.loadtest.offline.throughput import measure_throughput  # noqa: PLC0415

    try:
        with open_engine(config) as offline:
            report = measure_throughput(offline, dataset, config.load.seed or 0)
    except (ConfigurationError, RequestError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(report.render())
    write_json(output_json, report.to_json())


@engine_flags
@click.command()
@click.option(
    "--num-tokens",
    default="1,8,32,512",
    show_default=True,
    callback=_numbers,
    help="Tokens of a step, for the kernels that work token by token.",
)
@click.option(
    "--num-seqs",
    default="1,8,32",
    show_default=True,
    callback=_numbers,
    help="Sequences of a step, for attention and sampling.",
)
@click.option(
    "--context",
    type=_COUNT,
    default=1024,
    show_default=True,
    help="Tokens in the cache of each sequence.",
)
@click.option(
    "--only",
    type=click.Choice(["linear", "elementwise", "rotation", "attention", "copies", "sampling"]),
    help="Measure one group of kernels.",
)
@_OUTPUT_JSON
def kernels(
    model_argument: str | None,
    output_json: Path | None,
    num_tokens: list[int],
    num_seqs: list[int],
    only: str | None,
    **options: Any,  # noqa: ANN401 - one per setting
) -> None:
    """Measure each kernel at the sizes of MODEL: GB/s and GFLOP/s, and their share of the limits.

    The kernels are those that the engine would take on this device. Weights and caches are random
    and larger than the processor's caches, as in a model of many layers.
    """
    context = options.pop("context")
    config = engine_config(model_argument, options)
    set_thread_defaults()
    from octavo.loadtest.offline.kernels import (  # noqa: PLC0415 - see the docstring
        KernelOptions,
        measure_kernels,
    )

    wanted = KernelOptions(num_tokens, num_seqs, context, only or "")
    try:
        report = measure_kernels(
            config, wanted, lambda row: click.echo(f"{row.name} {row.shape}", err=True)
        )
    except ConfigurationError as error:
        raise click.ClickException(str(error)) from error
    click.echo(report.render())
    write_json(output_json, report.to_json())


@engine_flags
@click.command()
@click.option(
    "--num-tokens", type=_COUNT, default=1024, show_default=True, help="Tokens of the text."
)
@click.option(
    "--context",
    type=_COUNT,
    default=256,
    show_default=True,
    help="The text is cut into texts of so many tokens.",
)
@_OUTPUT_JSON
def quality(
    model_argument: str | None,
    output_json: Path | None,
    num_tokens: int,
    context: int,
    **options: Any,  # noqa: ANN401 - one per setting
) -> None:
    """Measure what --quantization int8 changes in the predictions of MODEL, on the CPU.

    The text is Python's own documentation. Beside int8 stands Q8_0, the 8-bit format of llama.cpp.
    For each of them: KL divergence from the predictions of the weights as they are, and how often
    both find the same token most likely.
    """
    config = engine_config(model_argument, options)
    set_thread_defaults()
    from octavo.loadtest.offline.quality import measure_quality  # noqa: PLC0415 - see the docstring

    try:
        report = measure_quality(
            config,
            num_tokens,
            context,
            lambda row: click.echo(f"{row.weights} in {row.computed_in}", err=True),
        )
    except ConfigurationError as error:
        raise click.ClickException(str(error)) from error
    click.echo(report.render())
    write_json(output_json, report.to_json())
