"""When to save: what a rank measures of its steps and saves, and the interval that all ranks agree on.

Knows neither Ray nor torch, no store and no exchange. ``docs/when_to_save.md`` says what a user sees of it, and why all
ranks decide alike.
"""
