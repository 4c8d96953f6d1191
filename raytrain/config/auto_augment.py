"""Policies of automatic augmentation, as ``--auto-augment`` names them."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from raytrain.errors import UsageError, did_you_mean

_WORDS = ("randaugment", "trivialaugment", "augmix", "3-augment")
_MAX_MAGNITUDE = {"rand": 30, "augmix": 10}


class AutoAugment(NamedTuple):
    """A policy, with torchvision's magnitude (RandAugment 0 to 30, AugMix 1 to 10) and number of operations.

    The number of operations is that of one image, and only RandAugment has a choice of it. ``trivial`` and
    ``3-augment`` have no magnitude.
    """

    policy: Literal["rand", "trivial", "augmix", "3-augment"]
    magnitude: int = 0
    num_operations: int = 1

    @classmethod
    def parse(cls, text: str) -> AutoAugment:
        """Return the policy that ``text`` names; raise UsageError if it names none.

        Example: ``AutoAugment.parse("rand-m9-n2") == AutoAugment.parse("randaugment")``
        """
        if text == "trivialaugment":
            return cls("trivial")
        if text == "3-augment":
            return cls("3-augment")
        # Numbers that the text leaves out are torchvision's defaults. A magnitude above the largest one leads to the
        # error below, whose sentence gives the limits.
        if parts := re.fullmatch(r"(?:randaugment|rand-m(\d+)(?:-n([1-9]))?)", text):
            policy = cls("rand", int(parts[1] or 9), int(parts[2] or 2))
            if policy.magnitude <= _MAX_MAGNITUDE["rand"]:
                return policy
        elif parts := re.fullmatch(r"augmix(?:-m([1-9]\d*))?", text):
            policy = cls("augmix", int(parts[1] or 3))
            if policy.magnitude <= _MAX_MAGNITUDE["augmix"]:
                return policy
        raise UsageError(
            f"--auto-augment is {text!r}{did_you_mean(text, _WORDS)}; give randaugment, or rand-m9-n2 with a magnitude "
            "of 0 to 30 and 1 to 9 operations, trivialaugment, augmix, or augmix-m3 with a severity of 1 to 10, or "
            "3-augment."
        )
