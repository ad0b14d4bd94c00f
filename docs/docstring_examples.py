"""For the API reference: our docstrings head their example "Example:", the parser knows "Examples:"."""

import re
from typing import Any

import griffe


class DocstringExamples(griffe.Extension):
    """Makes a section of each example, so that it is shown as code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
