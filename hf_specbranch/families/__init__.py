"""Every architecture of the installed transformers in a tiny form, and how speculation fares on it."""
