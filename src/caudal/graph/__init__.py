"""What a model is: a recorded Program of coarse ops, their specification, and passes over it."""
