"""From the options of what is sent to prompts."""

from pathlib import Path

import click
import numpy as np

from octavo.loadtest.options import DatasetOptions
from octavo.loadtest.workload import (
    Lengths,
    Prefixes,
    Prompt,
    Vocabulary,
    custom_prompts,
    prefix_repetition_prompts,
    random_prompts,
    sharegpt_prompts,
)

FILE_DATASETS = ("sharegpt", "custom")
_DEFAULT_OUTPUT_LEN = 128


def check_dataset(options: DatasetOptions) -> None:
    """Refuse a data set without its file. Raises ValueError."""
    if options["dataset_name"] in FILE_DATASETS and options["dataset_path"] is None:
        raise ValueError(f"--dataset-name {options['dataset_name']} needs --dataset-path")


def warn_of_unused_file(options: DatasetOptions) -> None:
    """Say on stderr that prompts are made although a file is named."""
    if options["dataset_name"] not in FILE_DATASETS and options["dataset_path"] is not None:
        click.echo(
            f"--dataset-path is not used: --dataset-name {options['dataset_name']} makes its"
            f" prompts; {' and '.join(FILE_DATASETS)} read a file",
            err=True,
        )


def draw_prompts(
    options: DatasetOptions, rng: np.random.Generator, count: int, vocabulary: Vocabulary
) -> list[Prompt]:
    """`count` prompts of the data set; made ones consist of pieces of `vocabulary`.

    Raises ValueError for a file that is not of the data set's form.
    """
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
