"""`octavo bench compare`."""

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import click
import orjson

from octavo.loadtest.client import ServerError
from octavo.loadtest.compare.processes import check_cores, stopped_like_ctrl_c
from octavo.loadtest.compare.report import Comparison
from octavo.loadtest.compare.rounds import run_rounds
from octavo.loadtest.compare.scenario import read_scenario
from octavo.loadtest.options import key_value_pairs
from octavo.loadtest.output import make_folder, write_output
from octavo.loadtest.serving import fresh_seed


@click.command()
@click.argument("scenario", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--set",
    "variables",
    multiple=True,
    metavar="NAME=VALUE",
    help="A variable of the scenario's commands; wins over the file's own. May be repeated.",
)
@click.option(
    "--server", "servers", multiple=True, help="Only this server of the file; may be repeated."
)
@click.option("--workload", "workloads", multiple=True, help="Only this workload; may be repeated.")
@click.option("--rounds", type=click.IntRange(min=1), help="In place of the file's number.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="Fixes prompts and arrival times. [default: another number each time, which is told]",
)
@click.option(
    "--result-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder of the page, the JSON file and what the servers wrote; made if missing.",
)
def compare(
    scenario: Path,
    variables: Sequence[str],
    servers: Sequence[str],
    workloads: Sequence[str],
    rounds: int | None,
    seed: int | None,
    result_dir: Path,
) -> None:
    """Put several servers under the same load, one after the other, and print the ratios.

    SCENARIO is a TOML file of start commands and workloads; loadtest/scenarios has examples. Each
    round starts every server in turn, runs all workloads, and stops it. Nothing else is stopped.
    """
    try:
        plan = read_scenario(scenario, key_value_pairs("=", variables))
        plan = plan.chosen(list(servers), list(workloads))
        for server in plan.servers:
            server.arguments(plan.variables, port=0)
        check_cores(plan)
    except (ServerError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if rounds is not None:
        plan = plan.model_copy(update={"rounds": rounds})
    folder = result_dir / f"compare-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    make_folder(folder)
    seed = fresh_seed() if seed is None else seed
    click.echo(f"prompts and arrival times: --seed {seed}", err=True)
    try:
        with stopped_like_ctrl_c():
            found = run_rounds(plan, seed, folder, lambda item: click.echo(item.line, err=True))
    except (ServerError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    comparison = Comparison(plan, found)
    click.echo(comparison.render())
    result = orjson.dumps(comparison.to_json() | {"seed": seed}, option=orjson.OPT_INDENT_2)
    write_output(folder / "comparison.json", result)
    write_output(folder / "comparison.html", comparison.page().encode())
    click.echo(f"result, charts and logs written to {folder}", err=True)
    if comparison.failed:
        sys.exit(1)
