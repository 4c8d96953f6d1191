"""What a command gives back, to be printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class CommandResult:
    """What a command prints: ``text`` for a person, or ``document`` as a JSON object."""

    text: RenderableType
    document: dict[str, Any]
    exit_code: int = 0
