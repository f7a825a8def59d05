"""The deployment of the project in the working directory, for verbs that predict: a backend of its config file, and the
budget in force.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_vram import settings, specfile
from pytest_vram.backends import gguf_file
from pytest_vram.cli import project
from pytest_vram.errors import BadInput, BadSize
from pytest_vram.predicting import options_of
from pytest_vram.sizing import engine_options
from pytest_vram.spec import BackendSpec, Limits


def config(options: argparse.Namespace) -> specfile.SpecFile:
    """The project's config file: ``--config``, ``PYTEST_VRAM_CONFIG``, else the one that ``vram check`` reads.

    :raises BadSpec: no such file, or one that cannot be used.
    """
    root = project.find(Path.cwd()).root
    variable = settings.variable("config")
    if getattr(options, "config", None) is not None:
        return specfile.read(specfile.locate(Path.cwd(), options.config, "--config"))
    if os.environ.get(variable):
        return specfile.read(specfile.locate(root, os.environ[variable], variable))
    return specfile.read(specfile.locate(root))


def backend(options: argparse.Namespace) -> BackendSpec:
    """The backend that ``--backend`` names.

    :raises BadInput: no such backend, or one whose engine is not sized.
    """
    file = config(options)
    spec = file.backends.get(options.backend)
    if spec is None:
        raise BadInput(
            f"{options.backend!r} is no backend of {file.path or 'a config file'} (from --backend):"
            f" {specfile.known(file.backends, options.backend)}"
        )
    if spec.engine != "llama-server":
        raise BadInput(
            f"backend {spec.name!r} (engine {spec.engine!r}) cannot be predicted: estimates are made for"
            " engine 'llama-server' only"
        )
    return spec


def merged(spec: BackendSpec, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A backend's model and options, with those of the command line in place of its own.

    :param given: by full name. :raises BackendError: there is no model there.
    """
    where = f"[backend.{spec.name}] in {spec.origin}"
    own = {
        name: value
        for name, value in options_of(spec).items()
        if engine_options.named(name, origin=where)[0].name not in given
    }
    return str(gguf_file.resolve(spec)), {**own, **given}


def budget(options: argparse.Namespace) -> tuple[Limits, str] | None:
    """The budget of ``PYTEST_VRAM_BUDGET``, else of the project's config file, and where it came from.

    :raises BadInput: a budget that cannot be read.
    """
    file = config(options)
    found = settings.gather({}, os.environ, {}, file.values, file.path).get("budget")
    if found is None:
        return None
    try:
        return settings.parse_budget(found.value), found.place
    except (BadSize, ValueError) as error:
        raise BadInput(f"{error} (from {found.place})") from None
