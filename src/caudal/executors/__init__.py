"""How a Program runs. `base` has the protocol; every other file here is one executor."""
