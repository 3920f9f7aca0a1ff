"""What the commands share: generated flags, output, errors, and the way from a MODEL to something that runs."""
