"""A rank's half of a save and a load, from top to bottom: ``save``, ``load``. ``call`` is its end of the line."""
