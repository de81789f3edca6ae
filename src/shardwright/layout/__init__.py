"""The one vocabulary of layouts that planner and runtime share: axes, ZeRO stages, legality."""
