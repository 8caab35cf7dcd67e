"""Moves one policy version's weights from the trainer into engines, attested and in flight.

``sender`` runs in the trainer, ``receiver`` in every engine worker; both need torch and nothing
else. ``group`` is what they share, ``checkpoint`` says which tensors an engine holds.
"""
