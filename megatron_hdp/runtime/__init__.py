"""What a rank needs to execute a plan, whatever model it trains; a room for each concern.

Design: `docs/design/timing.md`.
"""
