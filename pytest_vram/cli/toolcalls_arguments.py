"""Arguments of ``vram toolcalls run``."""

from __future__ import annotations

import argparse


def of_run(parser: argparse.ArgumentParser) -> None:
    """Add them; what their values mean is read by :mod:`pytest_vram.cli.toolcalls_run`."""
    add = parser.add_argument
    add("--backend", metavar="NAME", help="backend of the config file (default: its default)")
    add("--config", metavar="FILE", help="config file (default: the project's vram.toml)")
    add("--url", metavar="URL", help="a server that already runs, without a config file")
    add("--model", metavar="NAME", help="with --url: the model's name, where the server has several")
    add("--api-key-env", metavar="VAR", help="with --url: environment variable that holds the server's key")
    add("--cases", metavar="CASES", help="JSONL file, folder, shipped:NAME or bfcl:NAME (default: the shipped ones)")
    add("--limit", metavar="N", help="ask that many of the cases, of all categories")
    add("--seed", metavar="N", help="of the order in which they are asked (default 0)")
    add("--protocol", metavar="NAME", help="tools, json_schema or few_shot (default: the spec's, else tools)")
    add("--stream", action=argparse.BooleanOptionalAction, default=None, help="ask for streamed answers")
    add("--retries", metavar="N", help="most times that errors are given back for a case, 0 to 3 (default 1)")
    add("--target", metavar="SHARE", help="judge the rate against it, such as 0.94; without it the rate is printed")
    add("--mode", metavar="NAME", help="not_below (default), proven, sprt or point")
    add("--confidence", metavar="SHARE", help="of the verdict (default 0.95)")
    add("--margin", metavar="SHARE", help="the drop that sprt and a comparison are about (default 0.05)")
    add("--judge", metavar="NAME", help="first_try (default) or after_retry")
    add("--baseline", metavar="NAME|FILE", help="compare with another backend, or with earlier results, case by case")
    add("--aa", action="store_true", help="ask the baseline twice: what changes without any change")
    add("--output", metavar="FILE", help="results file (default: in the folder of the run)")
