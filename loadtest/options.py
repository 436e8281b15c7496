"""Options of the load test: their command-line forms and the checks on them."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

import click
import orjson

from octavo.loadtest.output import OutputFile
from octavo.loadtest.report import METRICS

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


class DatasetOptions(TypedDict):
    """Parsed options of what is sent, by parameter name."""

    dataset_name: str
    dataset_path: Path | None
    num_prompts: int
    input_len: int
    output_len: int | None
    random_range_ratio: float
    prefix_repetition_num_prefixes: int
    prefix_repetition_prefix_len: int
    prefix_repetition_suffix_len: int


class BenchOptions(DatasetOptions):
    """Parsed options of `octavo bench serve`, by parameter name."""

    base_url: str
    endpoint: str
    model: str | None
    tokenizer: str | None
    api_key: str | None
    header: dict[str, str]
    vocab_size: int | None
    text_prompts: bool
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    concurrency_sweep: list[int]
    num_warmups: int
    seed: int | None
    ignore_eos: bool
    temperature: float | None
    extra_body: dict[str, Any]
    percentile_metrics: list[str]
    metric_percentiles: list[float]
    goodput: dict[str, float]
    save_result: bool
    save_detailed: bool
    result_dir: Path
    result_filename: str | None
    label: str | None
    plot: Path | None


Callback = Callable[[click.Context, click.Parameter, Any], Any]


def key_value_pairs(separator: str, values: Sequence[str]) -> dict[str, str]:
    """Texts such as "a=b" as a mapping. Raises click.BadParameter for any other text."""
    pairs = {}
    for value in values:
        key, found, rest = value.partition(separator)
        if not found or not key.strip():
            raise click.BadParameter(f"{value!r} is not of the form KEY{separator}VALUE")
        pairs[key.strip()] = rest.strip()
    return pairs


def _headers(_ctx: click.Context, _param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    return key_value_pairs("=", values)


def _goodput(
    _ctx: click.Context, _param: click.Parameter, values: Sequence[str]
) -> dict[str, float]:
    words = [word for value in values for word in value.replace(",", " ").split()]
    limits = {}
    for name, text in key_value_pairs(":", words).items():
        if name not in GOODPUT_METRICS:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(GOODPUT_METRICS)}")
        limits[name] = _number(text, 0, math.inf)
    return limits


def _metrics(_ctx: click.Context, _param: click.Parameter, value: str) -> list[str]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    if unknown := [name for name in names if name not in METRICS]:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(METRICS)}")
    return names


def _percentiles(_ctx: click.Context, _param: click.Parameter, value: str) -> list[float]:
    return [_number(text, 0, 100) for text in value.split(",") if text.strip()]


def _concurrencies(_ctx: click.Context, _param: click.Parameter, value: str) -> list[int]:
    return positive_numbers(value) if value else []


def positive_numbers(value: str) -> list[int]:
    """The numbers of a list such as "1,8,32". Raises click.BadParameter for any other text."""
    try:
        numbers = [int(text) for text in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,8,32") from None
    if min(numbers) < 1:
        raise click.BadParameter(f"{min(numbers)} is below 1")
    return numbers


def _number(text: str, low: float, high: float) -> float:
    try:
        number = float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number") from None
    if not low <= number <= high:
        raise click.BadParameter(f"{text} is not in {low:g}..{high:g}")
    return number


def _json_object(_ctx: click.Context, _param: click.Parameter, value: str) -> dict[str, Any]:
    try:
        parsed = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise click.BadParameter(f"not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise click.BadParameter("not a JSON object")
    return parsed


class _PositiveFloat(click.FloatRange):
    """A number above 0; infinity is one, NaN is none."""

    name = "number"

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - click's signature
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail("nan is not above 0", param, ctx)
        return number


_COUNT = click.IntRange(min=1)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

Options = Sequence[Callable[[Callable[..., Any]], Callable[..., Any]]]

_SERVER_OPTIONS: Options = [
    click.option(
        "--base-url", default="http://127.0.0.1:8000", show_default=True, help="Server to measure."
    ),
    click.option(
        "--endpoint",
        default="/v1/completions",
        show_default=True,
        help="Route; one that ends in /chat/completions gets messages in place of a prompt.",
    ),
    click.option("--model", help="Model to ask for; the server's first one if not given."),
    click.option(
        "--tokenizer",
        help="Written into the result as tokenizer_id. No tokenizer is loaded: prompts are made"
        " of the server's own token ids, and the server counts tokens.",
    ),
    click.option("--api-key", envvar="OCTAVO_API_KEY", help="Key that the server asks for."),
    click.option(
        "--header",
        multiple=True,
        callback=_headers,
        metavar="KEY=VALUE",
        help="Further HTTP header; may be repeated.",
    ),
]

_DATASET_OPTIONS: Options = [
    click.option(
        "--dataset-name",
        type=click.Choice(["random", "prefix_repetition", "sharegpt", "custom"]),
        default="random",
        show_default=True,
        help="Where the prompts come from.",
    ),
    click.option(
        "--dataset-path",
        type=_FILE,
        help="File of sharegpt (JSON) or custom (JSONL with prompt and output_tokens).",
    ),
    click.option(
        "--num-prompts", type=_COUNT, default=100, show_default=True, help="Number of requests."
    ),
    click.option(
        "--input-len",
        type=_COUNT,
        default=128,
        show_default=True,
        help="Tokens of each random prompt.",
    ),
    click.option(
        "--output-len",
        type=_COUNT,
        help="Tokens to generate for each prompt. [default: 128; for sharegpt and custom what the"
        " file says]",
    ),
    click.option(
        "--random-range-ratio",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.0,
        show_default=True,
        help="Lengths of random prompts and answers are spread by this share, up and down.",
    ),
    click.option(
        "--prefix-repetition-num-prefixes",
        type=_COUNT,
        default=10,
        show_default=True,
        help="Number of shared beginnings.",
    ),
    click.option(
        "--prefix-repetition-prefix-len",
        type=_COUNT,
        default=256,
        show_default=True,
        help="Tokens of each shared beginning.",
    ),
    click.option(
        "--prefix-repetition-suffix-len",
        type=_COUNT,
        default=256,
        show_default=True,
        help="Tokens of each prompt after the shared beginning.",
    ),
]

_RUN_OPTIONS: Options = [
    click.option(
        "--vocab-size",
        type=_COUNT,
        help="Draw random ids from 0 up to this number. [default: ids of ordinary text, from the"
        " server's /tokenize; words of text if it has none]",
    ),
    click.option(
        "--text-prompts",
        is_flag=True,
        help="Make prompts of words, of about one token each, also where the server takes ids.",
    ),
    click.option(
        "--request-rate",
        type=_PositiveFloat(),
        default=math.inf,
        show_default=True,
        help="Requests per second; inf sends all at once.",
    ),
    click.option(
        "--burstiness",
        type=_PositiveFloat(),
        default=1.0,
        show_default=True,
        help="Shape of the gaps: 1 is a Poisson process, below is burstier, above more even.",
    ),
    click.option("--max-concurrency", type=_COUNT, help="Most requests at one time."),
    click.option(
        "--concurrency-sweep",
        default="",
        callback=_concurrencies,
        metavar="N,N,...",
        help="Run once for each of these values, in place of --max-concurrency, with fresh"
        " prompts.",
    ),
    click.option(
        "--num-warmups",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Requests that are sent before the measured ones and do not count.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        help="Fixes prompts and arrival times. A server that has seen the prompts before finds"
        " them in its prefix cache and looks faster. [default: another number in each run,"
        " which is told]",
    ),
    click.option(
        "--ignore-eos", is_flag=True, help="Generate the full output length, past end tokens."
    ),
    click.option("--temperature", type=float, help="Sent if given; 0 is greedy."),
    click.option(
        "--extra-body",
        default="{}",
        callback=_json_object,
        metavar="JSON",
        help="Further fields of each request; they replace those of the same name, and null takes"
        " one away.",
    ),
    click.option(
        "--percentile-metrics",
        default=",".join(METRICS),
        show_default=True,
        callback=_metrics,
        help="Metrics that are printed, separated by commas.",
    ),
    click.option(
        "--metric-percentiles",
        default="99",
        show_default=True,
        callback=_percentiles,
        help="Percentiles of each metric, separated by commas.",
    ),
    click.option(
        "--goodput",
        multiple=True,
        callback=_goodput,
        metavar="METRIC:MS",
        help="Limits in ms, of ttft, tpot or e2el; requests within all limits are counted as"
        ' goodput. "ttft:200 tpot:50" or repeated.',
    ),
    click.option("--save-result", is_flag=True, help="Write the result as JSON."),
    click.option(
        "--save-detailed", is_flag=True, help="With lengths, times, texts and errors of requests."
    ),
    click.option(
        "--result-dir",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path("results"),
        show_default=True,
        help="Folder of the result file; made if missing.",
    ),
    click.option(
        "--result-filename",
        help="Name of the result file; needs --save-result. [default: made from label, rate,"
        " concurrency, model, date]",
    ),
    click.option("--label", help="Name of this run in the result."),
    click.option(
        "--plot",
        type=OutputFile(".html", ".htm"),
        metavar="FILE.html",
        help="Write a page of charts (HTML, no further files): throughput over time, the"
        " distributions of the latencies, and throughput against latency of a sweep.",
    ),
]


def dataset_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command function with the options of what is sent."""
    return _decorate(command, _DATASET_OPTIONS)


def bench_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command function with all options, in the order of the lists."""
    return _decorate(command, [*_SERVER_OPTIONS, *_DATASET_OPTIONS, *_RUN_OPTIONS])


def _decorate(command: Callable[..., Any], options: Options) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def check_together(options: BenchOptions) -> None:
    """Refuse options of `octavo bench serve` of which one would do nothing beside the others.

    Raises click.UsageError.
    """
    if options["concurrency_sweep"] and options["max_concurrency"] is not None:
        raise click.UsageError(
            "--max-concurrency would do nothing beside --concurrency-sweep, whose values take its"
            " place; give one of them"
        )
    saved = options["save_result"] or options["save_detailed"]
    if options["result_filename"] is not None and not saved:
        raise click.UsageError("--result-filename does nothing without --save-result")


def parse_bench_flags(flags: Sequence[str]) -> BenchOptions:
    """What `octavo bench serve` would make of `flags`. Raises click.UsageError."""
    command = click.Command("serve", add_help_option=False)
    bench_options(command)
    return cast("BenchOptions", command.make_context("serve", list(flags)).params)
