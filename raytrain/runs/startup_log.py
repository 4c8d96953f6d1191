"""What a command waits for before it trains: messages of the level INFO, which logs leave out by default.

A terminal shows the last one as a moving line (see :mod:`raytrain.display.live_view`).
"""

from __future__ import annotations

import logging

STARTUP = logging.getLogger("raytrain.startup")
