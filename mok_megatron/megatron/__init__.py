"""Everything that knows Megatron Core. Read `register.py` (what is patched), then `layer.py`.

Nothing is imported here: `autoload.py` runs inside every `import torch` and must stay cheap.
"""
