"""``dockyard-refit push DIR --to URL``: a checkpoint into a running vLLM or SGLang server.

Stands alone: no trainer, no Ray, no configuration. With ``--transport disk`` not even torch is needed.

``cli`` parses, detects the server and reports; ``checkpoint_dir`` reads the directory; ``names`` compares
it with what is served; ``http`` talks; ``vllm_server`` and ``sglang_server`` know one server each;
``vllm_worker`` is what a vLLM server may load to take attested pushes.
"""
