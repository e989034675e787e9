"""Serving: one model, many requests at once. Importing it needs nothing beyond the package; HTTP needs the extra serve."""
