"""Asynchronous GRPO on Ray: three fleets, one pipeline, a thin app."""

__all__: list[str] = []
