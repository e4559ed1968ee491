"""The DeepSeek-V3 recipe in four sizes, and the same training under several token dispatchers side by side.

``scripts/pretrain_deepseek_v3.sh`` takes its model and parallel flags from `flags` (sizes: `presets`, libraries:
`dispatchers`) and its ``--dry-run`` from `dry_run`. ``scripts/compare.sh`` is `command`: it starts that script once a
dispatcher (`runs`), reads Megatron's log (`log`) and reports (`report`, `draw`).
"""
