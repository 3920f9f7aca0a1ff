"""How long a generation took, in llama.cpp's terms."""

from __future__ import annotations

from typing import NamedTuple

from caudal.core import RequestOutput, Timings


class Speed(NamedTuple):
    """One phase of a generation."""

    num_tokens: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def milliseconds_each(self) -> float:
        return 1000 * self.seconds / self.num_tokens if self.num_tokens else 0.0


def prompt_speed(output: RequestOutput) -> Speed:
    """The computed tokens of the prompt, until the first token came. `output` is the last one of its sequence."""
    times = output.timings or Timings()
    seconds = max(0.0, (times.first_token or times.total) - times.queued)
    return Speed(output.num_prompt_tokens - output.num_cached_tokens, seconds)


def output_speed(output: RequestOutput) -> Speed:
    """The tokens after the first one, whose time belongs to the prompt. `output` is the last one of its sequence."""
    times = output.timings or Timings()
    seconds = max(0.0, times.total - times.first_token) if times.first_token else 0.0
    return Speed(max(0, output.num_output_tokens - 1), seconds)


def timings(output: RequestOutput) -> dict[str, float]:
    """llama.cpp's `timings`: tokens, milliseconds and rates. Time in the queue is in none of them."""
    prompt, predicted = prompt_speed(output), output_speed(output)
    return {
        "cache_n": output.num_cached_tokens,
        "prompt_n": prompt.num_tokens,
        "prompt_ms": 1000 * prompt.seconds,
        "prompt_per_token_ms": prompt.milliseconds_each,
        "prompt_per_second": prompt.per_second,
        "predicted_n": output.num_output_tokens,
        "predicted_ms": 1000 * predicted.seconds,
        "predicted_per_token_ms": predicted.milliseconds_each,
        "predicted_per_second": predicted.per_second,
    }
