import os

__version__ = os.environ.get("ESPALIER_FAKE_TRTLLM_VERSION", "1.3.0rc29")
"""Its own version; another one changes the name alone, and not what is taken."""
