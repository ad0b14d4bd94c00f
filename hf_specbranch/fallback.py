"""How a call is left to transformers."""


class FallBack(Exception):
    """This call is left to transformers' own decoding; the message says why. Raised before the first token."""
