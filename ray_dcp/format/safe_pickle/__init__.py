"""Pickles without running what they say: what ``.metadata`` and stored Python values may name, and how they are made.

``metadata_rules`` (no torch needed) is for ``.metadata``; ``value_unpickler`` and ``plain_values`` are for stored
values. What a rank pickles when it saves is in ``planning/values``.
"""
