"""The options of a stored run that a network may be built from. Anybody may have written the run."""

from __future__ import annotations

from raytrain.config import ResolvedConfig
from raytrain.config.user_function import names_own_function, stored_function_error
from raytrain.runs.documents import read_resolved_config
from raytrain.runs.layout import CONFIG
from raytrain.storage.base import Store


def read_trusted_config(store: Store, *, trust: bool) -> ResolvedConfig:
    """The run's options. Raises UsageError if they name code of the run's author, unless the user says ``trust``."""
    config = read_resolved_config(store)
    if not trust and names_own_function(config.model):
        raise stored_function_error("model", config.model, f"{store.url}/{CONFIG}", may_be_named=False)
    return config
