"""The state of training as ``Stateful`` objects: model and optimizers, random state, and the place in the data."""
