"""Watch one generation and draw it: who worked when, on which tokens, and what became of them."""

from .chrome import chrome_trace
from .page import timeline_page
from .record import record
from .recording import Recording

__all__ = ["Recording", "chrome_trace", "record", "timeline_page"]
