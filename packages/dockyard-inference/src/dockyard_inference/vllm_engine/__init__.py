"""vLLM behind the ``Generator`` protocol, with the refit's receiving side inside its workers."""
