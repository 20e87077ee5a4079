"""The argument that names a model; apart from the other types, as it needs torch."""

import argparse

from dps_ray.models.named import refusal


def model_name(text: str) -> str:
    """One of the project's own models, or a model's folder."""
    why = refusal(text)
    if why is not None:
        raise argparse.ArgumentTypeError(why)
    return text
