"""The regression suite for a deployment; run it with ``vram check``. Installed as ``pytest_vram_specs``.

Each test states one promise of the deployment under test. Tests ask for capabilities, never for an engine by name,
and skip, naming what is missing, where the deployment cannot show it. The memory budget (``--vram-budget``) holds for
every test without a line here: the plugin judges it.
"""
