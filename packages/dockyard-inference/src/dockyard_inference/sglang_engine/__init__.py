"""SGLang behind the ``Generator`` protocol: an HTTP server of its own or of yours, refitted through files.

``generator`` is the engine; ``server`` starts and ends the child process, which ``guard`` watches over;
``client`` talks; ``requests`` knows what SGLang is asked and what it answers; ``staging`` holds verified
weights until the server takes them, and ``loading`` makes it take them.
"""
