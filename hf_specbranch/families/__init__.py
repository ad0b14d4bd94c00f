"""Every architecture of the installed transformers in a tiny form, and whether speculation is exact on it."""
