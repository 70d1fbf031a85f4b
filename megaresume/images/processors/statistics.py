"""Means and standard deviations that images are normalised by, and the names of published ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

from megaresume.stream.schema import Items, Options, Within, refused

Mean = Annotated[float, Within(-10, 10)]
Deviation = Annotated[float, Within(1e-6, 10)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics(Options):
    """Mean and standard deviation of red, green, blue, of values from 0 to 1."""

    mean: Annotated[tuple[Mean, Mean, Mean], Items()] = (0.5, 0.5, 0.5)
    std: Annotated[tuple[Deviation, Deviation, Deviation], Items()] = (0.5, 0.5, 0.5)


#: what published vision encoders were trained with.
CLIP = Statistics(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
IMAGENET = Statistics(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
STATISTICS = {
    "clip": CLIP,
    "imagenet": IMAGENET,
    "siglip": Statistics(),
    "none": Statistics(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)),
}


def _statistics(value: Any) -> Any:
    if isinstance(value, str) and value not in STATISTICS:
        raise refused(expected=f"one of {', '.join(STATISTICS)}, or mean and std")
    return STATISTICS.get(value) if isinstance(value, str) else value


#: ``normalize``: a name in `STATISTICS`, or {mean: [r, g, b], std: [r, g, b]}.
Normalize = Annotated[Statistics, BeforeValidator(_statistics)]
