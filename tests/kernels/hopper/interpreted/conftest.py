"""Triton decides at import whether it interprets: these tests have a process of their own.

``../test_interpreter.py`` starts it.
"""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
