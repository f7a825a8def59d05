"""Arguments of ``vram soak``."""

from __future__ import annotations

import argparse


def of_soak(parser: argparse.ArgumentParser) -> None:
    """Add them; what their values mean is read by :mod:`pytest_vram.cli.soak`."""
    add = parser.add_argument
    add("amount", nargs="?", metavar="AMOUNT", help="300turns, 8h (8hours) or 20m (20min); default: 120turns")
    add("--turns", metavar="N", help="the same as AMOUNT of Nturns")
    add("--hours", metavar="H", help="the same as AMOUNT of Hh")
    add("--backend", metavar="NAME", help="backend of the config file (default: its default)")
    add("--config", metavar="FILE", help="config file (default: the project's vram.toml)")
    add("--conversation", metavar="NAME|FILE", action="append", help="of a cycle, may be given several times")
    add("--dir", metavar="DIR", help="folder of the journal (default: .vram/soaks/BACKEND/1, 2 …)")
    add("--resume", action="store_true", help="go on with the soak in --dir, else with the newest one of the backend")
    add("--budget", metavar="SIZE", help="that no peak may be over (default: the config file's)")
    add("--host-budget", metavar="SIZE", help="that the server's host memory may not be over")
    add("--target", metavar="SHARE", help="share of tool calls that must be right, such as 0.94")
    add("--retention", metavar="SHARE", help="of the early decode rate that must be left (default 0.8)")
    add("--vram-device", metavar="SPEC", help="what to measure: auto (default), cpu, cuda:0, rpc:0 …")
    add("--quiet", action="store_true", help="no line for each turn; what goes wrong is said all the same")
