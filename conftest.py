"""The repository's own tests use the installed plugin (editable in a checkout) and pytest's test kit for plugins."""

pytest_plugins = ["pytester"]
