"""What training has, as ``Stateful`` objects: model and optimizers, random state, and the place in the data."""
