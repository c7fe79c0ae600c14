"""What a fine-tuned model is asked after each epoch. Longest answers last."""

from typing import NamedTuple


class Task(NamedTuple):
    name: str
    prompts: int
    prompt_tokens: int
    answer_tokens: int


TASKS = [
    Task("arithmetic", prompts=12, prompt_tokens=16, answer_tokens=4),
    Task("translation", prompts=6, prompt_tokens=40, answer_tokens=24),
    Task("summaries", prompts=60, prompt_tokens=200, answer_tokens=120),
]
