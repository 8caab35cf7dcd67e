"""A small exact engine on Hugging Face models, behind the ``Generator`` protocol."""
