"""The parts of ``elastic_train.py``: a run that loses a node, goes on with fewer workers, and grows back."""
