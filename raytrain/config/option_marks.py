"""Marks of options: properties in the annotation of a field, each read where it matters.

Everything about an option stands in one place, its field: its type and limits, its default, its help, and its marks::

    workers: Annotated[PositiveInt | str, "N|auto|MIN..MAX", Mark.COMMON, Mark.DECIDED_ANEW] = "auto"

A text among them is the form of its values, as the help shows it. Other code does not list the names of options, but
asks for a mark: ``options_with(Mark.DECIDED_ANEW)`` in ``options.py``. So a new option is complete with its field.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Mark(Enum):
    """A property of an option that some other part of raytrain asks for."""

    COMMON = auto()
    """Most people use it: ``--help`` shows it, and not only ``--help-all``."""
    SUBCOMMAND = auto()
    """It is chosen by a word of the command line, not by a flag."""
    SET_BY_FIND_RATE = auto()
    """``find-rate`` decides on it, so that command has no flag for it."""
    SWEEPABLE = auto()
    """It may differ between the trials of a sweep."""
    DESCRIBES_RUN = auto()
    """It names, places or describes the run, and changes nothing that the run computes."""
    OF_COMMAND = auto()
    """It is about the command that starts or resumes a run, not about the run."""
    DECIDED_ANEW = auto()
    """It is about the machines: each attempt decides on it, and a resumed run does not keep it."""
    DECIDED_AT_START = auto()
    """The first attempt decides on it if it is None or auto, and a resumed run keeps that."""
    CHOSEN_BY_AUTO = auto()
    """The recipe auto decides on it from the images, unless somebody has given it."""
    SHAPES_STATE = auto()
    """The state in checkpoints is laid out by it, so a resumed run must have the same value."""
    OF_LAUNCHER = auto()
    """It says how processes are started, or what they run: `raytrain.attach`, which starts none, refuses it."""
    SECRET = auto()
    """Its value may be a secret: no document of a run and no command that raytrain prints has it."""
    SHARED_PLACE = auto()
    """A folder, a file or a URL that all machines must reach."""
    OWN_CODE = auto()
    """It may name code of the user's own, which runs if the option is used."""


@dataclass(frozen=True)
class TakenBy:
    """Marks an option that takes effect only in ``call``, such as run.loss, which a user's loop may not make."""

    call: str


@dataclass(frozen=True)
class Synonym:
    """Marks an option that has a second flag, for people who come from other trainers."""

    flag: str


@dataclass(frozen=True)
class KnownAs:
    """Marks an option with the flags that other trainers have for it, in one text, without dashes before them.

    They are no flags here: the error for one of them names the option.
    """

    flags: str
