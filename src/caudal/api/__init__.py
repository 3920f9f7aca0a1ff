"""The HTTP server: one file per API dialect, on one port. `server.serve` runs it."""
