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

from torch import Tensor

from raytrain.errors import UsageError, some_of

_COUNTER = ".num_batches_tracked"  # of batch norm
_WORDS = re.compile(r"[a-z]+")
_PROJECTIONS = {"query": "q", "key": "k", "value": "v"}  # of attention: same shape, defined in any order


def named_as_in_network(
    weights: Mapping[str, Tensor], network: Mapping[str, Tensor], head: Sequence[str], source: str
) -> tuple[dict[str, Tensor], str | None]:
    """Return the weights of a file by the names of a network's state_dict, and a note if some are unused or guessed.

    Without a certain match, they are returned unchanged. The file may lack the tensors ``head``, or have them in other
    shapes. ``source`` says in messages where the weights come from.

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
    """Return the weights, and a note, if all names in the file, or all names in the network, have a prefix."""
    first = body[0]
    theirs = [name.removesuffix(first) for name in weights if name.endswith(f".{first}")]
    theirs = [prefix for prefix in theirs if all(prefix + name in weights for name in body)]
    if len(theirs) > 1:
        raise UsageError(
            f"{source} has the network's tensors {len(theirs)} times, with {some_of(theirs)} before their names; save "
            "those to train on with torch.save."
        )
    ours = [first.removesuffix(name) for name in weights if first.endswith(f".{name}")]
    ours = [
        prefix
        for prefix in ours
        if all(name.startswith(prefix) and name.removeprefix(prefix) in weights for name in body)
    ]
    if not theirs and not ours:
        return None

    # The head has the same prefix, or is new.
    their_name = {name: theirs[0] + name if theirs else name.removeprefix(ours[0]) for name in network}
    named = {name: weights[other] for name, other in their_name.items() if other in weights}
    unused = sorted(weights.keys() - set(their_name.values()))
    note = f"{source}: {len(unused):,} of {len(weights):,} tensors are not used, as the network has none such: "
    return _with_counters(named, network), f"{note}{some_of(unused)}." if unused else None


def _by_order(
    weights: Mapping[str, Tensor], network: Mapping[str, Tensor], head: Sequence[str], source: str
) -> tuple[dict[str, Tensor], str] | None:
    """Return the weights, and a note, if order, shapes and layers agree with the network's; None if in doubt."""
    has_counters = any(name.endswith(_COUNTER) for name in weights)
    ours = [name for name in network if has_counters or not name.endswith(_COUNTER)]
    if len(weights) == len(ours) - len(head):
        ours = [name for name in ours if name not in head]
    # safetensors sorts the names, so that their order tells nothing.
    theirs = list(weights)
    if len(theirs) != len(ours) or theirs == sorted(theirs):
        return None

    # A head for other classes has another shape, and is left out.
    pairs = list(zip(theirs, ours, strict=True))
    same_shape = [weights[other].shape == network[name].shape for other, name in pairs]
    if any(name not in head and not is_same for (_, name), is_same in zip(pairs, same_shape, strict=True)):
        return None
    layers = [(other.rpartition("."), name.rpartition(".")) for other, name in pairs]
    if any(other[2] != name[2] for other, name in layers):
        return None
    for before, (other, name) in pairwise(layers):
        if (other[0] == before[0][0]) != (name[0] == before[1][0]):
            return None

    # Compare the words in the last part of each layer's name: _depthwise_conv has depthwise and conv.
    words = [(_words(other[0]), _words(name[0])) for other, name in layers if ".".join(name[::2]) not in head]
    all_of_ours = {word for _, ours_of_layer in words for word in ours_of_layer}
    if any((their_words & all_of_ours) - our_words for their_words, our_words in words):
        return None

    named = {name: weights[other] for (other, name), is_same in zip(pairs, same_shape, strict=True) if is_same}
    first, last = pairs[0], next(pair for pair in reversed(pairs) if pair[1] in named)
    note = (
        f"{source}: the names differ, so {len(named):,} of the network's {len(network):,} tensors are taken by order "
        f"and shape, from {first[0]} as {first[1]} to {last[0]} as {last[1]}."
    )
    return _with_counters(named, network), note


def _words(layer: str) -> set[str]:
    """Return the words in the last part of a layer's name, with short names for the projections of attention."""
    words: list[str] = _WORDS.findall(layer.rpartition(".")[2].lower())
    return {_PROJECTIONS.get(word, word) for word in words}
