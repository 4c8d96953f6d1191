"""What ``timm:`` in front of a network's name means: it is one of timm's (``--model timm:convnextv2_tiny``)."""

from __future__ import annotations


def timm_name(model: str | None) -> str | None:
    """The name within timm, such as ``resnet50`` or, with a tag for its weights, ``resnet50.a1_in1k``; None if
    ``model`` is not timm's.
    """
    library, colon, name = (model or "").partition(":")
    return name if colon and library == "timm" else None
