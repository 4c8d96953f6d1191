"""Finds the tensors of a network in files of weights that have other names for them.

Two programs rarely give the layers of one architecture the same names. Often all names in the file, or all names in the
network, have a prefix, such as ``module.``, and the rest of the name tells which tensor is which. Otherwise only the
order is left: a state_dict lists layers as they were defined, usually in the order in which an image passes them, and
shapes change on the way. A wrong match would train without an error. So tensors are matched by order only if

- all of them have the shapes of the network's tensors, and the same last part of the name (weight, bias, running_mean);
- layers begin at the same tensors in both; and
- if a word in the name of a layer, such as ``conv`` or ``q``, occurs in the network, too, it occurs in the same layer.

A note says what was matched by order. Tensors without a match keep their names, so that the check of the names refuses
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from raytrain.errors import UsageError, some_of

_COUNTER = ".num_batches_tracked"  # of batch norm
_WORDS = re.compile(r"[a-z]+")
_PROJECTIONS = {"query": "q", "key": "k", "value": "v"}  # of attention: same shape, defined in any order


class _Pair(NamedTuple):
    """The name of a tensor, or of a layer, in the file, and that of its counterpart in the network."""

    in_file: str
    in_network: str


def named_as_in_network(
    weights: Mapping[str, Tensor], network: Mapping[str, Tensor], head: Sequence[str], source: str
) -> tuple[dict[str, Tensor], str | None]:
    """Return the weights of a file by the names of a network's state_dict, and a note if some are unused or guessed.

    Without a certain match, they are returned unchanged. The file may lack the tensors ``head``, or have them in other
    shapes. Counters of batches that old files lack are the network's. ``source`` begins each message: where the weights
    come from.

    Raises UsageError if the file has several sets of the network's tensors.

    Example::

        weights, note = named_as_in_network(torch.load("other.pt"), model.state_dict(), ["fc.weight", "fc.bias"], "It")
    """
    body = [name for name in network if name not in head and not name.endswith(_COUNTER)]
    if not body or all(name in weights for name in body):
        return _with_counters(weights, network), None
    return (
        _by_prefix(weights, network, body, source) or _by_order(weights, network, head, source) or (dict(weights), None)
    )


def _with_counters(weights: Mapping[str, Tensor], network: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights, with the network's counters of batches if they have none, as in files from before 2018."""
    if any(name.endswith(_COUNTER) for name in weights):
        return dict(weights)
    return {**weights, **{name: value for name, value in network.items() if name.endswith(_COUNTER)}}


def _by_prefix(
    weights: Mapping[str, Tensor], network: Mapping[str, Tensor], body: Sequence[str], source: str
) -> tuple[dict[str, Tensor], str | None] | None:
    """Return the weights if all names in the file, or all names in the network, have a prefix; None otherwise.

    The note, if any, says which tensors of the file are not used. ``body`` are the network's names without the head.
    """
    # The file's names have a prefix if each name of the network occurs in the file behind it. It stands before the
    # network's first name.
    first = body[0]
    candidates = [name.removesuffix(first) for name in weights if name.endswith(f".{first}")]
    prefixes_in_file = [prefix for prefix in candidates if all(prefix + name in weights for name in body)]
    if len(prefixes_in_file) > 1:
        raise UsageError(
            f"{source} has the network's tensors {len(prefixes_in_file)} times, with {some_of(prefixes_in_file)} "
            "before their names; save those to train on with torch.save."
        )

    # The network's names have a prefix if each of them occurs in the file without it.
    candidates = [first.removesuffix(name) for name in weights if first.endswith(f".{name}")]
    prefixes_in_network = [
        prefix
        for prefix in candidates
        if all(name.startswith(prefix) and name.removeprefix(prefix) in weights for name in body)
    ]

    # The head has the same prefix, or is new.
    if prefixes_in_file:
        name_in_file = {name: prefixes_in_file[0] + name for name in network}
    elif prefixes_in_network:
        name_in_file = {name: name.removeprefix(prefixes_in_network[0]) for name in network}
    else:
        return None
    named = {name: weights[in_file] for name, in_file in name_in_file.items() if in_file in weights}
    unused = sorted(weights.keys() - set(name_in_file.values()))
    note = (
        f"{source}: {len(unused):,} of {len(weights):,} tensors are not used, as the network has none such: "
        f"{some_of(unused)}."
    )
    return _with_counters(named, network), note if unused else None


def _by_order(
    weights: Mapping[str, Tensor], network: Mapping[str, Tensor], head: Sequence[str], source: str
) -> tuple[dict[str, Tensor], str] | None:
    """Return the weights, and a note, if order, shapes and layers agree with the network's; None if in doubt.

    The three conditions of the module's docstring are checked in turn.
    """
    # The file may have no counters of batch norm, and no head.
    has_counters = any(name.endswith(_COUNTER) for name in weights)
    names_in_network = [name for name in network if has_counters or not name.endswith(_COUNTER)]
    if len(weights) == len(names_in_network) - len(head):
        names_in_network = [name for name in names_in_network if name not in head]
    # safetensors sorts the names, so that their order tells nothing.
    names_in_file = list(weights)
    if len(names_in_file) != len(names_in_network) or names_in_file == sorted(names_in_file):
        return None

    # Shapes agree, but for a head for other classes, which is left out.
    pairs = [_Pair(in_file, name) for in_file, name in zip(names_in_file, names_in_network, strict=True)]
    fits = {pair: weights[pair.in_file].shape == network[pair.in_network].shape for pair in pairs}
    if any(not fits[pair] and pair.in_network not in head for pair in pairs):
        return None

    # So do the last parts of the names, and a layer begins at the same tensors in both.
    layers = [_Pair(pair.in_file.rpartition(".")[0], pair.in_network.rpartition(".")[0]) for pair in pairs]
    if any(pair.in_file.rpartition(".")[2] != pair.in_network.rpartition(".")[2] for pair in pairs):
        return None
    for before, layer in pairwise(layers):
        if (layer.in_file == before.in_file) != (layer.in_network == before.in_network):
            return None

    # Compare the words in the last part of each layer's name: _depthwise_conv has depthwise and conv.
    words = [
        (_words(layer.in_file), _words(layer.in_network))
        for layer, pair in zip(layers, pairs, strict=True)
        if pair.in_network not in head
    ]
    words_of_network = {word for _, in_network in words for word in in_network}
    if any((in_file & words_of_network) - in_network for in_file, in_network in words):
        return None

    fitting = [pair for pair in pairs if fits[pair]]
    named = {pair.in_network: weights[pair.in_file] for pair in fitting}
    first, last = pairs[0], fitting[-1]
    note = (
        f"{source}: the names differ, so {len(named):,} of the network's {len(network):,} tensors are taken by order "
        f"and shape, from {first.in_file} as {first.in_network} to {last.in_file} as {last.in_network}."
    )
    return _with_counters(named, network), note


def _words(layer: str) -> set[str]:
    """Return the words in the last part of a layer's name, with short names for the projections of attention.

    Example: ``_words("blocks.3.attn.query_proj") == {"q", "proj"}``
    """
    words: list[str] = _WORDS.findall(layer.rpartition(".")[2].lower())
    return {_PROJECTIONS.get(word, word) for word in words}
