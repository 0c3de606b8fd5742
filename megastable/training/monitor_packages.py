"""The packages behind DeepSpeed's writers, which are installed only where they are wanted."""

from __future__ import annotations

from importlib.util import find_spec

from megastable.config import RunConfig
from megastable.core.errors import UserError

PACKAGE_OF_SECTION = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


def check_monitor_packages(run: RunConfig) -> None:
    """Check that every enabled writer can be imported.

    Raises:
        UserError: a package is missing; the key and the command that installs it are named.
    """
    for section, package in PACKAGE_OF_SECTION.items():
        if getattr(run, section).enabled and find_spec(package) is None:
            raise UserError(f"{section}.enabled needs the package {package}: pip install {package}")
