"""The data plane beside the job: loaders, a planner and a constructor a node, as Ray actors.

Design: `docs/design/data-plane.md`.
"""
